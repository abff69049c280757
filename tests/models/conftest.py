"""Each test races anew, whatever another one kept, and over a few queries: who wins is not what is tested here."""

import pytest
import torch

from deployments.engines import auto_select

RACED = "deployments.engines.races"


@pytest.fixture(scope="session", autouse=True)
def short_races():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_select, "KEPT_S", -1)
        patch.setattr(f"{RACED}._TIMES", 1)
        for name, lengths in {"_SHORT": (16,) * 8, "_EQUAL": (75,) * 2, "_MIXED": (11, 198, 36)}.items():
            patch.setattr(f"{RACED}.{name}", lengths)
        yield


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side, one process a core: threads of several would only wait for each other. An engine that is
    given more sets its own.
    """
    torch.set_num_threads(1)
