from __future__ import annotations

import pytest

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
