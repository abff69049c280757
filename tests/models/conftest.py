"""Each test races anew, whatever another one kept."""

from __future__ import annotations

import pytest

from deployments.engines import race_results


@pytest.fixture(scope="session", autouse=True)
def nothing_is_kept():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race_results, "KEPT_S", -1)
        yield
