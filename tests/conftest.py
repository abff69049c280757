from __future__ import annotations

import pytest
from hypothesis import settings

# The same examples in each run: whoever runs the tests learns of what they changed. To look for what nobody has seen:
# make test TESTS='tests/unit --hypothesis-profile=default'
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

_figures: list[str] = []


@pytest.fixture
def figure():
    """Say a measured figure: it is shown at the end of the run, whether tests pass or not."""
    return _figures.append


def pytest_terminal_summary(terminalreporter):
    if _figures:
        terminalreporter.section("figures measured in this run")
        for line in _figures:
            terminalreporter.line(line)
