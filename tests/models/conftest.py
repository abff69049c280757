"""What all tests of models share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side, one process a core: threads of several would only wait for each other. An engine that is
    given more sets its own.
    """
    torch.set_num_threads(1)
