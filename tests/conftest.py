import pytest
from hypothesis import settings

# The same examples in each run: whoever runs the tests learns of what they changed. `make test-more` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture
def figure(request):
    """Say a measured figure: it is shown at the end of the run, whether tests pass or not."""

    def say(line: str) -> None:
        request.node.user_properties.append(("figure", line))  # it comes with the report from other processes too

    return say


def pytest_terminal_summary(terminalreporter):
    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    ended = [report for report in reports if getattr(report, "when", None) == "call"]
    lines = [line for report in ended for name, line in report.user_properties if name == "figure"]
    if lines:
        terminalreporter.section("figures measured in this run")
        for line in lines:
            terminalreporter.line(line)
