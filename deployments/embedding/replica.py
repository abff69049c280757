"""An embedding replica: one engine on one device. Both pools' deployments use this class."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from deployments.embedding.frames import Offers
from deployments.embedding.metrics import EmbedderMetrics
from deployments.embedding.run import EngineQuery, Indices, OfferedQuery, PlannedBatch, PlannedQuery, by_output
from deployments.embedding.run_loop import Ended, Passed, RunLoop
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy
from deployments.engines import Engine, TokenBatch, create_engine, embed
from deployments.engines.micro_batches import Lengths
from deployments.errors import not_finite
from deployments.models.model_files import ModelCard, read_model_card
from deployments.models.outputs import Numbers, Outputs, Rows, join, pack
from deployments.models.space import space_of
from deployments.serving.replica import Replica
from deployments.settings import Settings

_PASS_SHARE = 0.12  # of the SLO: the most that one pass should take
_SIZES = ((1, 75), (16, 75), (4, 250), (32, 10), (64, 75), (2, 500))  # of warm-up: queries, tokens of each
_FEWEST_SIZES = 2
_FIRST_S, _LONGEST_S = 1.0, 10.0  # no further size after so long; no further run
_RUNS, _RUNS_S = 3, 1.0  # the runs of a size that must agree; fewer if they take longer than this
_AGREE = 1.2  # the slowest of them, over the fastest


class Embedder(Replica[Settings]):
    """A replica of the accelerator or the CPU pool."""

    unit = "run"
    frame_type = Offers

    _engine: Engine
    _card: ModelCard
    _worker: RunLoop

    def _load(self, settings: Settings, device: str) -> tuple[Engine, ModelCard]:
        card = read_model_card(settings.model)
        self._space = space_of(card)
        return create_engine(card, self._settings, device, len(self._cores)), card

    def _start(self) -> RunLoop:
        info = self._engine.info
        self._metrics = self._open_metrics(EmbedderMetrics, info.engine, info.dtype)
        model = self._in_thread(self._measure)
        self._warm_up = {"alpha_s": model.alpha_s, "beta_s": model.beta_s}
        closed = Policy(slo_s=1.0, depth=0)  # until the first Router has sent its settings
        schedule = Scheduler[OfferedQuery](model, closed, self._engine.micro_batch_tokens)
        worker = RunLoop(
            schedule, self._compute, on_run=self._metrics.ran, on_failure=self._failed, on_policy=self._bound_passes
        )
        batch = self._warm_up_batch([min(QUERY_TOKENS, self._card.max_tokens)])
        worker.warmed_up(batch)
        return worker

    def _in_words(self) -> str:
        info = self._engine.info
        return f"{self._card.name} on {info.device}, {info.dtype} ({info.why})"

    def _describe(self) -> dict[str, Any]:
        return {**asdict(self._engine.info), "space": self._space, "warm_up": self._warm_up}

    def _publish(self) -> None:
        self._metrics.publish(self._worker.state())

    def _utilization(self) -> float:
        return self._worker.utilization()

    def _measure(self) -> CostModel:
        """Warm up with a few lengths and sizes. Returns a cost model to use until calibration. Raises SettingsError as
        `_time` does.
        """
        return measure(self._time, time.perf_counter, self._card.max_tokens, exact=self._engine.info.emulated)

    def _time(self, lengths: list[int]) -> float:
        """Seconds of one run. Raises SettingsError if the model computes numbers that are not finite."""
        batch, started = self._warm_up_batch(lengths), time.perf_counter()
        rows = embed(self._engine, batch, threading.Event())
        took_s = time.perf_counter() - started
        if not np.all(np.isfinite(rows)):
            raise not_finite(self._pool, self._card.name, self._engine.info.dtype)
        return took_s

    def _warm_up_batch(self, lengths: list[int]) -> TokenBatch:
        card = self._card
        return TokenBatch.random(card.vocab_size, lengths, len(lengths), card.outputs_for(card.kind))

    def _planned(self, planned: PlannedBatch) -> Sequence[EngineQuery] | None:
        card, queries = self._card, planned.queries
        if planned.tokens > card.max_tokens:
            return None
        ids = np.random.default_rng(0).integers(0, card.vocab_size, (queries, planned.tokens), np.int32)
        return [PlannedQuery(one, card.outputs_for(card.kind)) for one in ids]

    def _compute(self, run: Sequence[EngineQuery], passed: Passed, ended: Ended, stop: threading.Event) -> None:
        """Run these queries in the engine's thread. The loop is told when each pass and the run end."""
        on_loop = asyncio.get_running_loop().call_soon_threadsafe

        def tell(indices: Indices, answers: Iterable[Numbers], norms: Numbers) -> None:
            on_loop(passed, indices, answers, norms)

        def work() -> None:
            problem: BaseException | None = None
            try:
                self._run(run, tell, stop)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the run's queries must end
                problem = error
            on_loop(ended, problem)

        self._thread.submit(work)

    def _run(self, run: Sequence[EngineQuery], tell: Passed, stop: threading.Event) -> None:
        """Compute a run. Runs in the engine's thread."""
        lengths = [len(query.ids) for query in run]
        for group in by_output([query.outputs for query in run], lengths, self._engine.micro_batch_tokens):
            chosen, outputs = np.array(group, np.intp), run[group[0]].outputs
            batch = TokenBatch.pack([run[i].ids for i in group], outputs)
            for indices, found in self._engine.passes(batch, stop):
                rows, norms = self._shape(found, outputs, batch.lengths[indices])
                tell(chosen[indices], join(rows, outputs, batch.lengths[indices]), norms)

    def _shape(self, found: Sequence[Rows], outputs: Outputs, lengths: Lengths) -> tuple[list[Rows], Rows]:
        """Prepare outputs for the Router. Returns the rows of each output, and norms float32 [queries].

        - Embeddings become unit vectors. Their norms are sent as well, for clients that want the model's own vectors.
        - Rows of tokens, and the numbers of other kinds of model, stay as they are, with norms of 1.
        - A norm that is not finite marks a query whose numbers are not all finite.
        """
        shaped, norms = list[Rows](), np.ones(len(lengths), np.float32)
        starts = np.cumsum(lengths) - lengths
        for output, rows in zip(outputs, found, strict=True):
            if output == "text" and self._card.kind == "embedding":
                rows = rows[:, : self._card.dimension]  # noqa: PLW2901 - some models keep fewer (`truncate_dim`)
                length: Rows = np.linalg.norm(rows, axis=1).astype(np.float32, copy=False)
                norms *= length
                unit = rows / np.maximum(length, np.finfo(np.float32).tiny)[:, None]
                shaped.append(unit.astype(np.float32, copy=False))
                continue
            finite = np.all(np.isfinite(rows), axis=1)
            whole = finite if output == "text" else np.logical_and.reduceat(finite, starts)
            norms[~np.asarray(whole)] = np.nan
            is_words = output == "text" and self._card.kind == "sparse"
            shaped.append(pack(np.where(finite[:, None], rows, 0)) if is_words else rows)
        return shaped, norms

    def _bound_passes(self, schedule: Scheduler[OfferedQuery]) -> None:
        """Limit a pass to a small share of the SLO, so that answers leave early and no deadline is missed by a pass."""
        if alpha_s := schedule.limits.model.alpha_s:
            self._engine.bound_passes(int(_PASS_SHARE * schedule.limits.policy.slo_s / alpha_s * QUERY_TOKENS))
            schedule.set_pass_tokens(self._engine.micro_batch_tokens)


def measure(
    seconds: Callable[[list[int]], float], clock: Callable[[], float], longest: int, *, exact: bool = False
) -> CostModel:
    """The cost model to use until a calibration. `seconds(lengths)`: runs queries of these lengths, at most `longest`
    tokens each. `exact`: one run of a size is enough, as of emulated devices.

    Other work on the machine, such as the end of the replica that this one replaces, makes runs slower, never faster,
    and short runs most of all. So each size is timed, in turn with the others, until its fastest runs agree. The
    fastest counts.
    """
    began, times = clock(), dict[tuple[int, ...], list[float]]()
    for queries, tokens in _SIZES:
        if clock() > began + _FIRST_S and len(times) >= _FEWEST_SIZES:
            break
        lengths = [min(tokens, longest)] * queries
        times.setdefault(tuple(lengths), []).append(seconds(lengths))
    while not exact and (unsure := [size for size, took in times.items() if not _agree(took)]):
        for size in unsure:
            if clock() > began + _LONGEST_S and len(times[size]) > 1:
                return _fit(times)
            times[size].append(seconds(list(size)))
    return _fit(times)


def _agree(took: list[float]) -> bool:
    fastest = heapq.nsmallest(_RUNS, took)
    is_enough = len(fastest) == _RUNS or (len(fastest) > 1 and sum(fastest) > _RUNS_S)
    return is_enough and fastest[-1] <= _AGREE * fastest[0]


def _fit(times: dict[tuple[int, ...], list[float]]) -> CostModel:
    return CostModel.fit([(size, min(took)) for size, took in times.items()])
