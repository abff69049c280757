"""Reading, comparing and writing a config file: whole or not at all, with a backup."""

import os
import re
import stat
from pathlib import Path

import pytest

from calibration.service import config_file
from calibration.service.config_file import read_text, unified_diff, write_atomically
from deployments.errors import SettingsError


def test_the_diff():
    assert unified_diff("a\nb\n", "a\nb\n", "c.yaml") == ""
    assert unified_diff("a\nb\r\n", "a\nc\r\n", "c.yaml") == "--- c.yaml\n+++ c.yaml\n@@ -1,2 +1,2 @@\n a\n-b\r\n+c\r\n"
    assert unified_diff("a", "b", "c.yaml").endswith(
        "-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"
    )


def test_reading_keeps_line_ends(tmp_path):
    (tmp_path / "c").write_bytes("é\r\nb\n\r".encode())
    assert read_text(tmp_path / "c") == "é\r\nb\n\r"


def test_reading_fails_in_one_sentence(tmp_path):
    with pytest.raises(SettingsError, match="none: cannot be read: No such file or directory"):
        read_text(tmp_path / "none")
    (tmp_path / "c").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="c: is not UTF-8 text"):
        read_text(tmp_path / "c")


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "c.yaml"
    made.write_bytes(b"a\r\n")
    made.chmod(0o640)
    return made


def modes(folder):
    return {path.name: (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()}


def test_written_with_a_backup_beside_it(file):
    backup = write_atomically(file, "a\r\n", "é\r\n")
    assert re.fullmatch(r"c\.yaml\.bak-\d{8}T\d{6}\.\d{6}Z", backup.name)
    assert modes(file.parent) == {"c.yaml": ("é\r\n".encode(), 0o640), backup.name: (b"a\r\n", 0o640)}


def test_a_backup_never_replaces_another(file):
    backups = [write_atomically(file, before, after) for before, after in (("a\r\n", "b"), ("b", "c"), ("c", "d"))]
    assert [backup.read_bytes() for backup in backups] == [b"a\r\n", b"b", b"c"]


def test_a_link_stays_a_link(file, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link.yaml"
    link.symlink_to("../c.yaml")
    backup = write_atomically(link, "a\r\n", "b")
    assert link.is_symlink()
    assert file.read_bytes() == b"b"
    assert backup.parent == tmp_path


def test_a_file_that_changes_at_the_last_moment_is_left_alone(file, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: file.write_bytes(b"theirs"))
    with pytest.raises(SettingsError, match="changed during the calibration"):
        write_atomically(file, "a\r\n", "b")
    assert modes(file.parent) == {"c.yaml": (b"theirs", 0o640)}


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(28, "No space left"), SettingsError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
@pytest.mark.parametrize("call", ["copy2", "fsync", "replace"])
def test_a_failure_leaves_the_original_and_nothing_else(file, monkeypatch, call, error, raised):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr({"copy2": config_file.shutil, "fsync": os, "replace": Path}[call], call, fail)
    with pytest.raises(raised) as caught:
        write_atomically(file, "a\r\n", "b")
    if raised is SettingsError:
        assert str(caught.value) == f"{file}: cannot be written: No space left"
    assert modes(file.parent) == {"c.yaml": (b"a\r\n", 0o640)}
