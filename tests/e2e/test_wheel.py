"""The wheel, in an environment that has nothing else of ours: `windve serve` in an empty folder answers."""

import importlib.metadata
import math
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests.kit.service import ROOT, SHARED, Service, load_yaml

PARTS = ("serve_app", "deployments", "calibration")  # as pyproject.toml has them
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
TIMEOUT_S = 300


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built of a copy, so that nothing of an earlier build is in it and none is left behind."""
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if int(version.partition(".")[0]) < 77:
        pytest.skip(f"setuptools 77 or newer is not installed (it is {version}): the wheel is not built")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    run(*pip, "--wheel-dir", built, source, cwd=built)
    (found,) = built.glob("windve-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment's folder of programs. What windve needs is read from this process's environment, whose own
    windve is not found: Python follows no link (.pth) of a folder that is itself linked.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    (packages / "needed.pth").write_text("".join(f"{path}\n" for path in others))
    return programs


def test_the_wheel_holds_what_is_read_beside_the_code(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in PARTS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".yaml", ".json", ".sh", ".proto"} and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT)) in names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An empty folder, and no way from there to the checkout."""
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
        monkeypatch.delenv(name, raising=False)
    (folder := tmp_path / "empty").mkdir()
    return folder


def test_the_command_is_the_wheel_s_own(installed, bare):
    code = "import serve_app, calibration, deployments; print(serve_app.__file__, calibration.__file__)"
    places = run(installed / "python", "-c", code, cwd=bare).split()
    assert all(place.startswith(str(installed.parent)) for place in places), places
    assert re.fullmatch(r"windve \S+\n", run(installed / "windve", "--version", cwd=bare))
    assert run(installed / "windve", "check", cwd=bare).endswith("config.yaml: good\n")
    bench = subprocess.run(
        [installed / "windve", "bench"], cwd=bare, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (bench.returncode, bench.stdout) == (1, "")
    assert bench.stderr.startswith("windve: the installed package contains no benchmarks")


def test_it_serves_embeddings_from_an_empty_folder(installed, bare, tmp_path):
    service = Service(load_yaml("config.yaml"), tmp_path)  # whose ports it takes, by options
    ports = ("--port", str(service.port), "--grpc-port", str(service.grpc_port))
    service.command, service.started_in = [str(installed / "windve"), "serve", *ports, "--slo", "30"], bare
    SHARED.stop()
    try:
        service.start()
        reply = service.ask("/v1/embeddings", {"input": "Where does the overflow go?"})
        assert reply.status == 200
        (item,) = reply.json()["data"]
        assert math.isclose(math.hypot(*item["embedding"]), 1.0, rel_tol=1e-3)
        assert service.get("/info")["windve"]["slo_s"] == 30.0
        shown = run(installed / "windve", "top", f"http://127.0.0.1:{service.port}", "--once", cwd=bare)
        assert "all-MiniLM-L6-v2" in shown
        assert list(bare.iterdir()) == []
        assert service.press_ctrl_c() == 0, service.log.read_text()
    finally:
        service.stop()
