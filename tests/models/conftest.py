"""Engines are timed over a few queries: how fast they are is not what is tested here."""

import pytest
import torch

RACED = "deployments.engines.races"


@pytest.fixture(scope="session", autouse=True)
def short_races():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{RACED}._TIMES", 1)
        for name, lengths in {"_EQUAL": (75,) * 2, "_MIXED": (11, 198, 36)}.items():
            patch.setattr(f"{RACED}.{name}", lengths)
        yield


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side, one process a core: threads of several would only wait for each other. An engine that is
    given more sets its own.
    """
    torch.set_num_threads(1)
