"""Ray ignores a variable whose name it does not know, so a later Ray might ask for something else unnoticed."""

import importlib.util
from pathlib import Path

import pytest

from serve_app.local.ray_environment import LESS_OFTEN

RAY = Path(importlib.util.find_spec("ray").origin).parent
COMPILED = RAY / "core" / "src" / "ray" / "raylet" / "raylet"  # has RAY_x, in small letters, by the name x


@pytest.fixture(scope="module")
def python_sources():
    folders = ("_private", "dashboard", "serve/_private")
    return "\n".join(path.read_text(encoding="utf-8") for name in folders for path in (RAY / name).rglob("*.py"))


@pytest.mark.parametrize("name", LESS_OFTEN)
def test_ray_reads_the_variable(name, python_sources):
    option = name.removeprefix("RAY_")
    if option.islower():
        assert option.encode() in COMPILED.read_bytes()
    else:
        assert f'"{name}"' in python_sources
