import contextlib

import orjson
import pytest

from calibration.measure.journal import Burst, Journal
from deployments.errors import SettingsError

ABOUT = {"application": "windve", "replicas": {"accelerator": ["r1"]}, "wishes": {"slo_s": 1.0, "shape": "burst"}}


def burst(sent, stage="sweep"):
    latencies = {"accelerator": [0.018 * sent + 0.27] * sent, "cpu": []}
    return Burst(stage, 1.7e9 + sent, {"accelerator": sent, "cpu": 0}, sent, 0, 0, latencies)


@pytest.fixture
def opened(tmp_path):
    """Opens a journal in the same folder, after the one before ended as a killed run ends."""
    with contextlib.ExitStack() as stack:

        def open_journal(about=ABOUT, *, fresh=False):
            stack.close()
            return stack.enter_context(contextlib.closing(Journal(tmp_path / "out", about, fresh=fresh)))

        yield open_journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "unfinished.jsonl"


def replay(journal, one):
    return journal.replayed(one.stage, one.depths, one.sent)


def lines(path):
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_burst_is_on_the_disk_before_the_next_is_sent(opened, path):
    journal = opened()
    assert lines(path) == [ABOUT]
    for count in (1, 2, 3):
        journal.add(burst(count))
        assert len(lines(path)) == 1 + count
        assert Burst(**lines(path)[-1]) == burst(count) == journal.bursts[-1]


def test_an_interrupted_run_goes_on_where_it_stopped(opened, path):
    first = opened()
    for sent in (1, 6):
        first.add(burst(sent))
    again = opened()
    assert again.resumed == 2
    assert [replay(again, burst(sent)) for sent in (1, 6, 36)] == [burst(1), burst(6), None]
    again.add(burst(36))
    assert again.bursts == [burst(1), burst(6), burst(36)]
    third = opened()
    assert [replay(third, burst(sent)) for sent in (1, 6, 36)] == again.bursts


@pytest.mark.parametrize(
    "asked",
    [("stress test", {"accelerator": 6, "cpu": 0}, 6), ("sweep", {"accelerator": 6}, 6), ("sweep", burst(6).depths, 7)],
    ids=["stage", "depths", "sent"],
)
def test_what_follows_a_burst_that_is_not_asked_for_is_measured_anew(opened, path, asked):
    first = opened()
    for sent in (1, 6, 36):
        first.add(burst(sent))
    again = opened()
    assert replay(again, burst(1)) == burst(1)
    assert again.replayed(*asked) is None
    assert replay(again, burst(6)) is None
    assert replay(again, burst(36)) is None
    again.add(burst(2))
    assert lines(path)[1:] == [orjson.loads(orjson.dumps(done)) for done in (burst(1), burst(2))]


@pytest.mark.parametrize("about", [{**ABOUT, "application": "other"}, {}, {**ABOUT, "wishes": {"slo_s": 2.0}}])
def test_a_run_about_something_else_is_not_resumed(opened, path, about):
    opened().add(burst(1))
    other = opened(about)
    assert other.resumed == 0
    assert replay(other, burst(1)) is None
    assert lines(path) == [about]


def test_fresh_starts_over(opened, path):
    opened().add(burst(1))
    assert opened(fresh=True).resumed == 0
    assert lines(path) == [ABOUT]


def test_tuples_and_lists_are_the_same_thing_on_the_disk(opened):
    opened({"replicas": ("r1", "r2")}).add(burst(1))
    assert opened({"replicas": ("r1", "r2")}).resumed == 1


def test_a_line_that_was_cut_off_is_left_out(opened, path):
    first = opened()
    first.add(burst(1))
    whole = path.read_bytes()
    first.add(burst(2))
    last = path.read_bytes()[len(whole) : -2]  # without its last brace, too
    for cut in range(len(last)):
        path.write_bytes(whole + last[:cut])
        journal = opened()
        assert journal.resumed == 1
        assert replay(journal, burst(1)) == burst(1)
        assert replay(journal, burst(2)) is None


@pytest.mark.parametrize("content", [b"", b"\n", b'{"appli', b"\xff\xfe\n"])
def test_a_file_without_a_first_line_is_no_run(opened, path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    assert opened().resumed == 0


def test_nothing_is_left_to_resume_of_a_finished_run(opened, path):
    journal = opened()
    journal.add(burst(1))
    journal.finish()
    assert not path.exists()
    assert opened().resumed == 0


def test_a_folder_that_cannot_be_written_is_refused_by_its_option(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"--out: .*file cannot be written: File exists"):
        Journal(tmp_path / "file", ABOUT, fresh=False)


def test_a_run_that_is_interrupted_again_before_it_replays_loses_nothing(opened):
    opened().add(burst(1))
    opened()  # the pass did not arrive, or Ctrl-C
    assert opened().resumed == 1


def test_a_second_run_in_the_same_folder_is_refused_and_leaves_the_first_one_s_bursts(opened, path):
    first = opened()
    first.add(burst(1))
    for fresh in (False, True):
        with pytest.raises(SettingsError, match=r"--out: another calibration writes into .*: wait until it has ended"):
            Journal(path.parent, {**ABOUT, "wishes": {}}, fresh=fresh)
    first.add(burst(6))
    again = opened()
    assert [replay(again, burst(sent)) for sent in (1, 6)] == [burst(1), burst(6)]


def test_bursts_of_another_version_are_sent_again(opened, path):
    opened().add(burst(1))
    with path.open("ab") as file:
        file.write(b'{"stage": "sweep"}\n')
    assert opened().resumed == 1
