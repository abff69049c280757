"""The Router tokenizes a request, chooses replicas for it and returns the answer. Start reading at `Router.embed`.

The Router does not admit: each replica decides for itself (`scheduler`). The Router offers a query to the accelerator
replicas first, then to the CPU replicas. Within a pool, the replica with the earliest predicted finish comes first. If
every replica that it asked refuses, it raises Busy (`placer`). A bulk request waits at the Router until replicas have
room (`bulk`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from deployments.admission.quota import Charge
from deployments.embedding.bulk import BulkQueue
from deployments.embedding.config import RouterConfig
from deployments.embedding.link import Answers
from deployments.embedding.metrics import RouterMetrics
from deployments.embedding.placer import Placer
from deployments.embedding.pool import LEAST_SHARE, Pool, added_share, is_left_out
from deployments.embedding.request import Embedded, Request, UsualRequest, embedded
from deployments.embedding.retries import Placement
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS
from deployments.embedding.scheduler.limits import is_deferrable
from deployments.errors import DeadlineExceeded, TimedOut, WindveError, WrongKind
from deployments.hardware.device_detector import ACCELERATOR, CPU, Topology
from deployments.models.encoder import Encoder
from deployments.models.model_files import ModelCard, read_model_card
from deployments.models.outputs import TEXT
from deployments.models.space import space_of
from deployments.models.tokenizer_check import ask_once, checked_tokenizer
from deployments.models.tokenizing import ON_LOOP, estimated_tokens
from deployments.serving.router import BaseRouter, Handles, RouterContext
from deployments.settings import Settings

logger = logging.getLogger("ray.serve")

_TIMER_S = 0.001  # how much too early a timer may fire
_AHEAD, _SPARE = 1.5, 8  # tokenize 1.5 times the queries that have room, plus 8: the room is an estimate


class Router(BaseRouter[Settings, RouterConfig, Pool, ModelCard]):
    """One replica of the Router deployment. `handles[pool]` is (name, handle) of the pool's embedder deployment."""

    pool_type = Pool

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        handles: Handles,
        context: RouterContext[ModelCard, Encoder] | None = None,
    ) -> None:
        context = context or _context(settings)
        super().__init__(settings, topology, handles, context)
        self.metrics = RouterMetrics(context.instruments)
        self.encoder = context.tokenizer
        self._placer = Placer(self.pools)
        self._bulk = BulkQueue(self._placer)
        self._usual = UsualRequest()
        self.topology_reason = topology.reason

    def _parse(self, user_config: Any) -> RouterConfig:
        max_inputs = self.settings.limits.max_inputs_per_request
        return RouterConfig.parse(user_config, self.topology.pools, max_inputs=max_inputs)

    def _put_in_force(self, config: RouterConfig) -> str:
        self._placer.config = config
        policy = {
            "slo_s": config.slo_s,
            "admission": config.admission,
            "bulk_share": config.bulk.share,
            "max_batch_fraction": config.fair_share.max_batch_fraction,
        }
        for name, pool in self.pools.items():
            pool.configure(config.pool(name), policy)
        self._replicas_changed()  # a pool may have opened or closed
        depths = {name: pool.config.queue_depth for name, pool in self.pools.items()}
        return f"admission by {config.admission}, SLO {config.slo_s:g} s, depths {depths}"

    def _choose_pools(self) -> None:
        """With `cpu_overflow: auto`, leave the CPU pool out while it adds too little."""
        if self.settings.cpu_overflow != "auto" or not self.topology.cpu_overflow:
            return
        accelerator, cpu = self.pools[ACCELERATOR], self.pools[CPU]
        is_closed = accelerator.config.queue_depth == 0
        share = None if is_closed else added_share(accelerator.speed, cpu.speed, self.config.slo_s)
        before, cpu.left_out = cpu.left_out, is_left_out(share, before=cpu.left_out)
        if cpu.left_out:
            self.topology_reason = (
                f"accelerator only: the CPU would add {share:.1%}, less than {LEAST_SHARE:.0%} (cpu_overflow: auto)"
            )
        else:
            self.topology_reason = self.topology.reason
        if cpu.left_out != before:
            logger.info("%s: %s", self.card.name, self.topology_reason)

    def _replicas_changed(self) -> None:
        self._choose_pools()
        self._placer.ejections.replicas_changed()
        self._bulk.reconsider()

    # --- the path of a query ------------------------------------------------------------------------------------------

    async def embed(self, request: Request) -> Embedded:
        """Answer a request of one or more queries, with embeddings or whatever else the model computes, and count it.

        Raises WrongKind, InvalidInput, Busy, Unavailable, TimedOut, DeadlineExceeded or EngineFailed.
        """
        try:
            self._take(request)
            answers = await self._answer(request)
        except BaseException as error:
            gave_up, count = isinstance(error, DeadlineExceeded | asyncio.CancelledError), len(request.queries)
            self.metrics.failed(error, count, late=gave_up and self._is_late(request))
            if isinstance(error, WindveError):
                error.is_counted = True
            if request.tenant is not None:
                self.metrics.tenants.refused(request.tenant.name, error, count)
            raise
        rows_of = partial(self.encoder.rows, outputs=request.outputs, role=request.role)
        request.done = done = embedded(request, answers, rows_of)
        self._count(request, answers, done)
        return done

    def count_invalid(self, error: WindveError) -> None:
        """Count a request that was refused before its queries were known."""
        if not error.is_counted:
            self.metrics.failed(error, 1)

    async def _answer(self, request: Request) -> Answers:
        """Charge, tokenize and place the request. Raises what `embed` raises."""
        most_s = self._most_s(request)
        allowed_s = request.timeout_s or math.inf
        try:
            async with asyncio.timeout_at(request.started + min(most_s, allowed_s)) as timeout:
                self._charge(request)
                self._refuse_early(request)  # before any expensive work
                await self._tokenize(request)
                if (longer_s := self._most_s(request)) > most_s:  # it has turned out to be bulk
                    most_s = longer_s
                    timeout.reschedule(request.started + min(most_s, allowed_s))
                self._refuse_overdue(request)
                return await self._place(request)
        except TimeoutError:
            raise self._gave_up(request, most_s) from None
        except Exception as error:
            if request.charge is not None:
                request.charge.failed(error)
            raise

    async def _place(self, request: Request) -> Answers:
        """Have replicas answer the request, and settle its charge."""
        if not request.bulk:  # it waits in a queue of its own, and needs no room
            self._usual.learn(len(request.ids), request.tokens)
        self.placed += 1
        try:
            lengths = request.lengths(range(len(request.ids))) if request.charge is not None else ()
            self._settle(request, lengths)
            if request.bulk:
                answers = await self._bulk.answer(request)
            else:
                answers = await Placement(self._placer, request).answered()
            self._settle(request, lengths, answers)
            return answers
        finally:
            self.placed -= 1

    def room_requests(self) -> float:
        """For how many more requests of the usual size the replicas have room. `inf` if a device is idle: what comes
        then may be shorter than usual. Also if no replica can answer, since the Router says that better than its door.
        """
        now = asyncio.get_running_loop().time()
        if not self.can_answer or self._placer.is_idle(now):
            return math.inf
        queries = self._placer.room_now(now, self._usual.tokens)
        return queries / (self._usual.queries * self._placer.routers)

    def _charge(self, request: Request) -> None:
        """Charge an estimate to the client's quota before any wait. Raises OverQuota."""
        if request.quota is None:
            return
        request.charge = Charge(request.quota)
        request.charge.check(asyncio.get_running_loop().time(), self._placer.routers)
        self._settle(request, self._estimated_lengths(request))

    def _settle(self, request: Request, lengths: Sequence[int], answers: Answers | None = None) -> None:
        charge = request.charge
        if charge is not None and charge.quota is not None:
            charge.settle(self._placer.price(lengths, charge.quota.unit, answers))

    def _take(self, request: Request) -> None:
        """Set its deadline, class and outputs. Raises WrongKind, InvalidInput or DeadlineExceeded."""
        card, timeout_s, slo_s = self.card, request.timeout_s, self.config.slo_s
        kind = next((kind for kind in request.kinds if kind in card.kinds), None)
        if kind is None or not {"text", *card.token_widths}.issuperset(request.outputs):
            kinds = " or ".join(request.kinds)
            raise WrongKind(f"this needs a model of the kind {kinds}; {card.name} is {' and '.join(card.kinds)}")
        if timeout_s is not None and timeout_s <= 0:
            raise _too_late(timeout_s)
        request.outputs = request.outputs or card.outputs_for(kind)
        request.prompt = self.encoder.prompt(request.prompt_name)
        request.started = asyncio.get_running_loop().time() - request.waited_s
        allowed_s = slo_s if timeout_s is None else min(timeout_s, self.config.request_timeout_s)
        request.due = request.started + allowed_s
        request.deferrable = is_deferrable(self.config.admission, slo_s, allowed_s)
        request.model = card.name

    def _most_s(self, request: Request) -> float:
        return self.config.bulk.timeout_s if request.bulk else self.config.request_timeout_s

    def _refuse_early(self, request: Request) -> None:
        """Raises Busy or Unavailable before the request is tokenized if no replica would admit it. If that were found
        only afterwards, MiniLM on two cores would be late with 2 to 4 % of its answers at 2.5 times the capacity.
        """
        if not self.can_answer:
            raise self._placer.unavailable()
        count = len(request.queries)
        if request.bulk or (count > 1 and not self._placer.fits(request, self._estimated_tokens(request))):
            self._bulk.check(count)
            return
        if not request.deferrable:  # deferrable queries are offered even to full replicas
            lengths = self._estimated_lengths(request)
            if self._placer.is_full(request, lengths[0]) and not self._placer.is_never(request, lengths):
                raise self._placer.busy_everywhere(request, lengths)
        if request.characters > ON_LOOP:
            self._refuse_long_texts(request)

    def _estimated_tokens(self, request: Request) -> float:
        return estimated_tokens(request.queries, self.card.max_tokens)

    def _estimated_lengths(self, request: Request) -> list[int]:
        return [round(self._estimated_tokens(request))] * len(request.queries)

    def _refuse_long_texts(self, request: Request) -> None:
        """Raises Busy if the wait for the tokenizer is too long, or if queries ahead in it will take all room."""
        now, tokenizing = asyncio.get_running_loop().time(), self.encoder.tokenizing
        left_s, room = request.due - now, (tokenizing.queries + len(request.queries) - _SPARE) / _AHEAD
        tokens = self._estimated_tokens(request)
        if request.deferrable:
            has_room = self._placer.idle_take(room, tokens, left_s)
        else:
            has_room = self._placer.room_now(now, tokens, room) >= room
        if not has_room or tokenizing.waiting_s > left_s:
            raise self._placer.busy(request)

    async def _tokenize(self, request: Request) -> None:
        """Fill `request.ids`, and make the request a bulk one if it is too large to be admitted at once."""
        request.ids, request.tokenizing_s = await self.encoder.encode(
            request.queries, request.prompt, cuts=request.cuts, role=request.role, characters=request.characters
        )
        request.tokenized = asyncio.get_running_loop().time()
        if request.outputs != TEXT:
            self.encoder.check_numbers(request.ids, request.outputs)
        if len(request.queries) > 1 and not request.bulk:
            mean = sum(map(len, request.ids)) / len(request.ids)
            request.bulk = not self._placer.fits(request, mean)

    def _refuse_overdue(self, request: Request) -> None:
        """Raises Busy or DeadlineExceeded if the deadline passed while the request was tokenized: an idle replica might
        still take it to probe its device.
        """
        is_promised = self.config.admission == "deadline" and not request.bulk
        if is_promised and request.tokenized > request.due:
            raise self._placer.busy(request)

    def _gave_up(self, request: Request, most_s: float) -> DeadlineExceeded | TimedOut:
        timeout_s = request.timeout_s
        if timeout_s is not None and timeout_s < most_s:
            return _too_late(timeout_s)
        key = "bulk.timeout_s" if request.bulk else "request_timeout_s"
        return TimedOut(f"no answer within {most_s:g} s ({key}); try again later")

    def _is_late(self, request: Request) -> bool:
        """Whether the SLO applies to the request and its deadline has passed, so that giving it up counts as late."""
        if request.model is None or self._placer.is_never(request, request.lengths(range(len(request.ids)))):
            return False
        now = asyncio.get_running_loop().time()
        return not request.bulk and now > request.due - _TIMER_S

    def _count(self, request: Request, answers: Answers, done: Embedded) -> None:
        if request.tenant is not None:
            lengths = request.lengths(range(len(request.ids)))
            device_s = self._placer.price(lengths, "device_seconds", answers)
            self.metrics.tenants.used(request.tenant.name, len(answers), tokens=done.tokens, device_s=device_s)
        pools = [pool for pool, _ in answers.values()]
        self.metrics.answered(pools, tokenization_s=done.tokenization_s, queue_s=done.queue_s)
        if not request.bulk:
            allowed_s = self.config.slo_s if request.timeout_s is None else request.allowed_s
            self.metrics.promised(done.total_s, allowed_s)
            if request.predicted_s is not None:
                late = done.total_s > allowed_s
                self.metrics.recent.finished(request.predicted_s, done.total_s, pools[-1], late=late)

    # --- status -------------------------------------------------------------------------------------------------------

    @property
    def can_answer(self) -> bool:
        """Whether a live replica has an open queue."""
        return self._placer.can_answer

    @property
    def live_pools(self) -> dict[str, bool]:
        """For each pool that is not closed, whether it has a live replica."""
        return {name: bool(pool.live) for name, pool in self.pools.items() if pool.config.queue_depth != 0}

    @property
    def load(self) -> int:
        """Unanswered queries of all Routers, as last reported by the replicas."""
        return sum(pool.in_flight for pool in self.pools.values())

    @property
    def capacity(self) -> int:
        """Queries of 75 tokens that may be in flight at once, over all pools."""
        return int(self._placer.capacity)

    @property
    def routers(self) -> int:
        """Routers that live, this one included, as far as the replicas know."""
        return self._placer.routers

    @property
    def refused(self) -> int:
        """Requests answered busy since the start."""
        return self._placer.refused

    def _about(self, pool: str) -> dict[str, Any]:
        """`capacity` and `room`: how many queries of 75 tokens the pool has room for when idle, and now."""
        found = self.pools[pool]
        room = found.room_now(asyncio.get_running_loop().time(), QUERY_TOKENS)
        return {"capacity": int(found.capacity(QUERY_TOKENS, self.config.slo_s)), "room": int(room)}

    def _publish(self) -> None:
        self._choose_pools()  # replicas may have measured, or a device may be ejected
        self.metrics.publish(self.config.slo_s, {name: pool.gauges() for name, pool in self.pools.items()})


def _context(settings: Settings) -> RouterContext[ModelCard, Encoder]:
    """The environment of the current Serve replica, with the model's tokenizer."""
    card = read_model_card(settings.model)
    fast = checked_tokenizer(card, settings.model.tokenizer, ask_once)
    encoder = Encoder(card, auto_truncate=settings.limits.auto_truncate, fast=fast)
    return RouterContext.of_serve(card, encoder, space_of(card))


def _too_late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer within the {timeout_s:g} s that the request allows; allow more, or send less")
