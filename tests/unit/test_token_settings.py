"""Which token `make serve` gives its Ray: a user's own, or one of its own making."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from serve_app.local.ray_environment import _set_token

OURS = "<made by us>"


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is as before at the end, whatever is set meanwhile
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "at_home", "mode", "path"),
    [
        ({}, False, "token", OURS),
        ({}, True, "token", None),  # Ray finds it there, but asks for no token unless it is told to
        ({"RAY_AUTH_TOKEN": "t"}, False, "token", None),
        ({"RAY_AUTH_TOKEN_PATH": "/a/token"}, False, "token", "/a/token"),
        ({"RAY_AUTH_MODE": "token"}, False, "token", OURS),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/a/token"}, True, "token", "/a/token"),
        ({"RAY_AUTH_MODE": "disabled"}, False, "disabled", None),
    ],
)
def test_a_users_own_token_is_used_and_else_one_is_made(monkeypatch, clean, environment, at_home, mode, path):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if at_home:
        (clean / "home" / ".ray").mkdir()
        (clean / "home" / ".ray" / "auth_token").write_text("t")
    console = Console(record=True, quiet=False, width=200, file=(clean / "terminal").open("w"))
    _set_token(clean, console)
    console.file.close()
    made = clean / "ray-token"
    assert os.environ["RAY_AUTH_MODE"] == mode
    assert os.environ.get("RAY_AUTH_TOKEN_PATH") == (str(made) if path == OURS else path)
    assert os.environ.get("RAY_AUTH_TOKEN") == environment.get("RAY_AUTH_TOKEN")
    assert made.exists() == (path == OURS)
    if path == OURS:
        assert made.stat().st_mode & 0o077 == 0
        assert len(made.read_text()) == 64
    warned = "anyone who can reach this machine can run code" in (clean / "terminal").read_text()
    assert warned == (mode == "disabled")
    assert Path.home() == clean / "home"
    assert {entry.name for entry in Path.home().iterdir()} == ({".ray"} if at_home else set())
