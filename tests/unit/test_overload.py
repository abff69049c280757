"""The overload benchmark: schedules, early stopping, accounting, and its client against a server in this process."""

import asyncio
import json
import math
from collections import Counter
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as benchmarks
from benchmarks.comparisons import overload
from benchmarks.overload import command, report, sweep
from benchmarks.overload.account import figures
from benchmarks.overload.client import Comeback, Endpoint, OpenLoop, Outcome, hint_of
from benchmarks.overload.early_stopping import odds, proves, queries_needed
from benchmarks.overload.schedule import ARRIVALS, BURSTS, EQUAL, LENGTHS, MIXED, POISSON, Query, Shape, span_s
from benchmarks.overload.sweep import Plan
from calibration.load import Clients

GENEROUS_S = 60.0  # nothing here takes so long, on however busy a machine

# --- schedules --------------------------------------------------------------------------------------------------------

shapes = st.builds(Shape, st.sampled_from(ARRIVALS), st.sampled_from(LENGTHS), st.floats(0.1, 5.0))


@given(shapes, st.floats(0.5, 50.0), st.floats(0.0, 20.0), st.integers(0, 200))
def test_a_schedule_is_long_enough_and_the_same_again(shape, queries_s, seconds, queries):
    schedule = shape.schedule(queries_s, seconds, queries)
    moments = [query.at_s for query in schedule]
    assert schedule == shape.schedule(queries_s, seconds, queries)
    assert moments == sorted(moments)
    assert len(schedule) >= max(1, queries)
    assert all(8 <= query.tokens <= shape.longest for query in schedule)
    assert span_s(schedule, seconds, shape) >= max(seconds, moments[-1])
    if shape.arrivals == BURSTS:  # whole bursts, so that the rate is what was asked for
        lasts_s = moments[-1] + shape.period_s
        assert len(schedule) == int(queries_s * shape.period_s * round(lasts_s / shape.period_s) + 0.5)
        assert {round(at_s / shape.period_s % 1, 6) % 1 for at_s in moments} == {0.0}


def test_lengths():
    equal, mixed = (Counter(query.tokens for query in Shape(POISSON, lengths, 1.0).schedule(100.0, 10.0))
                    for lengths in (EQUAL, MIXED))  # fmt: skip
    assert set(equal) == {75}
    assert min(mixed) < 20
    assert max(mixed) == 256  # longer ones are cut
    assert len(mixed) > 100
    assert {query.tokens for query in Shape(POISSON, EQUAL, 1.0, longest=32).schedule(10.0, 1.0)} == {32}


# --- early stopping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percentile", "late", "queries"),
    [
        (0.9, 1, 64),  # single stream
        (0.99, 1, 662),  # multi-stream: min_query_count in mlperf.conf
        (0.99, 0, 459),  # ceil(log(0.01) / log(0.99))
        (0.9, 0, 44),
    ],
)
def test_published_numbers_of_queries(percentile, late, queries):
    assert queries_needed(late, percentile) == queries


@given(st.integers(1, 200), st.integers(0, 40), st.sampled_from([0.5, 0.9, 0.99]))
def test_the_odds_are_those_of_the_binomial_distribution(on_time, late, percentile):
    queries = on_time + late
    exact = sum(math.comb(queries, k) * percentile ** (queries - k) * (1 - percentile) ** k for k in range(late + 1))
    assert odds(on_time, late, percentile) == pytest.approx(exact, rel=1e-6)


@given(st.integers(0, 60))
def test_one_query_fewer_proves_nothing(late):
    queries = queries_needed(late)
    assert proves(queries, late)
    assert not proves(queries - 1, late)
    assert queries_needed(late + 1) > queries


# --- accounting -------------------------------------------------------------------------------------------------------


def outcome(status, seconds=0.5, **more):
    return Outcome(Query(0.0, 75), 0.0, seconds, status, **more)


IN_TIME, LATE, REFUSED, BROKEN = outcome(200), outcome(200, 1.5), outcome(429, 0.1, hint_s=2.0), outcome(None)
GAVE_UP = outcome(None, 5.0, gave_up=True)


@pytest.mark.parametrize(
    ("outcomes", "counts"),
    [
        ([IN_TIME] * 3, {"in_time": 3, "late_share": 0.0, "goodput_s": 1.5}),
        ([outcome(200, 1.0)], {"in_time": 1, "late": 0}),
        ([IN_TIME, LATE, GAVE_UP], {"late": 2, "gave_up": 1, "late_share": 2 / 3, "failed": 0}),
        ([IN_TIME, REFUSED, REFUSED], {"refused": 2, "refused_share": 2 / 3, "late_share": 0.0}),
        ([outcome(status) for status in (408, 429, 503, 504)], {"refused": 4, "failed": 0, "late": 0}),
        ([BROKEN, outcome(500), outcome(404)], {"failed": 3, "late": 0, "refused": 0, "requests_per_answer": None}),
        ([], {"sent": 0, "late_share": 0.0, "goodput_s": 0.0, "answer_p99_s": None}),
    ],
)
def test_what_became_of_queries(outcomes, counts):
    found = figures(outcomes, [], 1.0, 2.0)
    assert {key: found[key] for key in counts} == counts


@pytest.mark.parametrize(
    ("outcomes", "valid", "kept", "more"),
    [
        ([IN_TIME] * 459, True, True, 0),
        ([IN_TIME] * 400, False, False, 59),
        ([IN_TIME] * 661 + [LATE], True, True, 0),
        ([IN_TIME] * 500 + [LATE], False, False, 161),
        ([IN_TIME] * 459 + [REFUSED] * 459, False, True, 0),  # MLPerf knows no refusals
        ([LATE] * 100, False, False, None),
    ],
)
def test_what_is_proven(outcomes, valid, kept, more):
    found = figures(outcomes, [], 1.0, 2.0)
    assert (found["mlperf_valid"], found["p99_kept"], found["more_queries"]) == (valid, kept, more)


def test_the_truth_of_retry_after():
    comebacks = [
        Comeback(2.0, early=False, tries=1, admitted_s=2.0),
        Comeback(2.0, early=False, tries=3, admitted_s=6.0),
        Comeback(2.0, early=False, tries=8, admitted_s=None),
        Comeback(2.0, early=True, tries=1, admitted_s=1.0),
        Comeback(2.0, early=True, tries=1, admitted_s=None),
    ]
    found = figures([IN_TIME, REFUSED, outcome(503)], comebacks, 1.0, 2.0)
    assert (found["hinted_share"], found["followed"]) == (0.5, 5)
    assert (found["hint_kept"], found["hint_early"], found["hint_ratio"]) == (1 / 3, 0.5, 2.0)
    assert found["hint_tries"] == 4.0
    assert found["requests_per_answer"] == (3 + 14) / (1 + 3)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "1", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "Wed, 25 Nov 2026 10:00:30 GMT"}, 30.0),
        ({"retry-after": "Wed, 25 Nov 2026 09:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after-ms": "soon"}, None),
    ],
)
def test_hints(headers, seconds):
    assert hint_of(headers, datetime(2026, 11, 25, 10, tzinfo=UTC)) == seconds


# --- the client -------------------------------------------------------------------------------------------------------


def reply(status, body, headers=""):
    return f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(body)}\r\n\r\n{body}".encode()


ANSWER = reply(200, '{"data": [{"embedding": [1.0]}]}')
HINTED = reply(429, "{}", "retry-after-ms: 1\r\n")
CLOSED = b""


def beside(answer_of, use):
    """What `use(port)` returns, in a thread beside a server that answers POST number n with `answer_of(n)`, and closes
    the connection where that is nothing; it answers a GET with 404, as one without /ping.
    """
    count = [0]

    async def answer(reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[16:]) for line in head.split(b"\r\n") if line[:15] == b"content-length:"), 0)
                await reader.readexactly(length)
                if head.startswith(b"GET"):
                    writer.write(reply(404, "{}"))
                    continue
                number, count[0] = count[0], count[0] + 1
                if not (found := answer_of(number)):
                    return
                writer.write(found)
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            return await asyncio.to_thread(use, listening.sockets[0].getsockname()[1])

    return asyncio.run(run())


def sent(answer_of, queries, timeout_s=GENEROUS_S):
    """The open loop after so many queries at once."""

    def use(port):
        async def run():
            endpoint = Endpoint.parse(f"http://127.0.0.1:{port}")
            clients = Clients(endpoint.address, timeout_s)
            loop = OpenLoop(clients, endpoint)
            try:
                await loop.run([Query(0.0, 16)] * queries)
            finally:
                clients.hang_up()
            return loop

        return asyncio.run(run())

    return beside(answer_of, use)


def test_answers_refusals_and_broken_connections():
    answers = [ANSWER, HINTED, reply(503, "{}"), reply(500, "{}"), CLOSED] * 4
    loop = sent(lambda number: answers[number] if number < len(answers) else ANSWER, len(answers))
    statuses = Counter(one.status for one in loop.outcomes)
    assert statuses == {200: 4, 429: 4, 503: 4, 500: 4, None: 4}
    assert {one.hint_s for one in loop.outcomes if one.status == 429} == {0.001}
    assert not any(one.gave_up for one in loop.outcomes)
    assert all(one.seconds >= one.lag_s >= 0 for one in loop.outcomes)
    assert len(loop.comebacks) == 1  # the first of the four


def test_clients_that_come_back():
    """Every tenth refused client, at the hint and at half of it in turn."""
    loop = sent(lambda number: HINTED if number < 20 else ANSWER, 20)
    assert [(one.early, one.tries) for one in sorted(loop.comebacks, key=lambda one: one.early)] == [
        (False, 1), (True, 1)
    ]  # fmt: skip
    assert all(one.admitted_s is not None for one in loop.comebacks)


@pytest.mark.parametrize("answer", [reply(200, "{}"), reply(401, '{"error": "no key"}'), CLOSED, reply(429, "{}")])
def test_a_server_that_gives_no_embedding_is_not_measured(answer):
    def use(port):
        with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}"):
            sweep.check(Endpoint.parse(f"http://127.0.0.1:{port}"))

    beside(lambda number: answer, use)


# --- the command, tables and picture ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_signal_handlers(monkeypatch):
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)


def test_a_whole_sweep_of_a_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "capacity", lambda *_: {"queries_s": 20.0, "steps": {4: 20.0}})
    options = "--name a/b --loads 0.5,2 --seconds 0.1 --queries 5 --slo 2 --bursts --model m"

    def use(port):
        words = ["--url", f"http://127.0.0.1:{port}", "--out", str(tmp_path), *options.split()]
        return benchmarks.main(["overload", *words])

    assert beside(lambda number: HINTED if number % 3 == 2 else ANSWER, use) == 0
    kept = json.loads((tmp_path / "a-b.json").read_text())
    assert [(one["lengths"], one["arrivals"], one["load"]) for one in kept["samples"]] == [
        (lengths, arrivals, load) for lengths in LENGTHS for arrivals in ARRIVALS for load in (0.5, 2.0)
    ]
    for one in kept["samples"]:
        assert one["sent"] == len(one["raw"]) >= 5
        assert one["in_time"] + one["late"] + one["refused"] + one["failed"] == one["sent"]
        assert one["refused"] > 0
        assert one["failed"] == 0
    assert (tmp_path / "overload.png").read_bytes().startswith(b"\x89PNG")
    tables = (tmp_path / "overload.md").read_text()
    assert "## At twice the load" in tables
    assert "## Retry-After" in tables
    assert command.main(["--out", str(tmp_path)]) == 0  # again, of what was kept
    assert (tmp_path / "overload.md").read_text() == tables


def test_capacity_is_what_a_closed_loop_gets():
    plan = Plan.usual(GENEROUS_S, closed_s=0.02)
    found = beside(
        lambda _: ANSWER, lambda port: sweep.capacity(Endpoint.parse(f"http://127.0.0.1:{port}"), plan, EQUAL)
    )
    assert found["queries_s"] == max(found["steps"].values()) > 0
    assert list(found["steps"])[:2] == [4, 8]
    with pytest.raises(RuntimeError, match="refuses"):
        beside(lambda _: HINTED, lambda port: sweep.capacity(Endpoint.parse(f"http://127.0.0.1:{port}"), plan, EQUAL))


def test_what_cannot_be_measured_is_said(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path)]) == 1
    assert command.main(["--url", "http://127.0.0.1:1", "--out", str(tmp_path)]) == 1
    assert "does not answer" in capsys.readouterr().err


def sample(name, load, outcomes, **more):
    found = figures(outcomes, [], 1.0, 1.0)
    about = {"contestant": name, "lengths": EQUAL, "arrivals": POISSON, "load": load, "capacity_s": 10.0}
    return {**about, **found, "offered_s": 10.0 * load, "client_cores": 0.1, "recover_s": None, **more}


SAMPLES = [
    sample("windve", 1.0, [IN_TIME] * 10),
    sample("windve", 2.0, [IN_TIME] * 9 + [REFUSED] * 11),
    sample("LitServe", 1.0, [IN_TIME] * 9 + [LATE]),
    sample("LitServe", 2.0, [IN_TIME] * 6 + [LATE] * 14),
]


def test_tables():
    twice, worst, truth, every, more = report.sheets(SAMPLES, 1.0)
    assert [row[0] for row in twice.rows] == ["windve", "LitServe"]
    assert [row[1] for row in worst.rows] == ["2 x Poisson, equal"] * 2
    assert len(every.rows) == len(more.rows) == 4
    assert [(row[0], row[-3]) for row in more.rows] == [
        ("windve", "449 queries too few"), ("windve", "450 queries too few"), ("LitServe", "no"), ("LitServe", "no")
    ]  # fmt: skip
    assert truth.rows == [["windve", "100%", "0", "-", "-", "-"]]


def test_the_comparison_shows_settings_and_goals(tmp_path):
    tuned = {"LitServe": {"setting": "batch 16", "tried": {"as it comes": 0.2, "batch 16": 0.6}}}
    found = {"samples": SAMPLES, "tuned": tuned}
    assert overload.sheets(found)[-1].rows == [["LitServe", "batch 16", "as it comes: 20%; batch 16: 60%"]]
    late, goodput = overload.goals(found)
    assert (late.reached, goodput.reached) == (0.0, 1.5)
    overload.plot(found).savefig(tmp_path / "overload.png")
