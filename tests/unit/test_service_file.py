import os
import tempfile

import pytest

from serve_app.local import service_file
from serve_app.local.service_file import LocalService

HERE = LocalService(os.getpid(), "http://127.0.0.1:8265", "127.0.0.1:6379", {"RAY_AUTH_MODE": "token"})


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_is_announced_is_found_until_it_is_withdrawn(scratch):
    assert service_file.find() is None
    HERE.announce()
    assert service_file.find() == HERE
    HERE.withdraw()
    assert service_file.find() is None
    assert list(scratch.iterdir()) == []


def test_the_last_one_that_runs_is_found(scratch):
    HERE.announce()
    other = LocalService(os.getppid(), "http://127.0.0.1:8266", "127.0.0.1:6379", {})
    other.announce()
    os.utime(other._path, ns=(2**62, 2**62))
    assert service_file.find() == other
    other.withdraw()
    assert service_file.find() == HERE
    HERE.withdraw()
    assert list(scratch.iterdir()) == []


def test_a_service_that_has_died_is_not_found():
    LocalService(2**22 + 1, "http://127.0.0.1:8265", "127.0.0.1:6379", {}).announce()
    assert service_file.find() is None


def test_a_folder_that_others_can_write_to_is_not_trusted(scratch):
    HERE.announce()
    (folder,) = scratch.iterdir()
    folder.chmod(0o777)
    assert service_file.find() is None
    LocalService(os.getpid(), "http://127.0.0.1:1", "127.0.0.1:6379", {}).announce()
    assert "8265" in HERE._path.read_text()
    assert service_file.private_folder() is None


def test_a_link_in_its_place_is_not_trusted(scratch):
    (scratch / "elsewhere").mkdir(mode=0o700)
    (scratch / f"windve-service-{os.getuid()}").symlink_to(scratch / "elsewhere")
    assert service_file.private_folder() is None


def test_the_folder_is_its_users_alone():
    assert service_file.private_folder() == service_file.private_folder()
    assert service_file.private_folder().stat().st_mode & 0o777 == 0o700
