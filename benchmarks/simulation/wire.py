"""Simulates what is between a Router and a replica: their cores, and a network with a one-way delay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from deployments.embedding.frames import Answered, Offers, Report
from deployments.embedding.link import Channel, PendingOffer

if TYPE_CHECKING:
    from deployments.embedding.run_loop import RunLoop

_IN_ORDER_S = 1e-9  # two frames of one connection never arrive at the same moment


@dataclass(frozen=True, slots=True)
class Costs:
    """Core seconds. A frame takes `frame_s`, plus `item_s` per query or answer in it, at each end."""

    query_s: float = 0.0  # a Router's, for a query that is answered, without the frames
    refusal_s: float = 0.0  # a Router's, for a query that is refused
    place_s: float = 0.0  # a Router's, for choosing replicas
    frame_s: float = 0.0
    item_s: float = 0.0

    def of_frame(self, items: int) -> float:
        return self.frame_s + items * self.item_s

    @property
    def of_answer(self) -> float:
        """A Router's core seconds until the client has an answer."""
        return self.query_s - self.refusal_s / 2


FREE = Costs()


class Core:
    """One process's event loop, which does its work in sequence."""

    __slots__ = ("_free_at", "busy_s", "frames")

    def __init__(self) -> None:
        self._free_at = 0.0
        self.busy_s = 0.0
        self.frames = 0  # frames sent

    def done_at(self, now: float, seconds: float) -> float:
        """When work that arrives now will be done."""
        self._free_at = max(now, self._free_at) + seconds
        self.busy_s += seconds
        return self._free_at


class Line:
    """One direction of a connection: frames arrive in the order in which they were sent."""

    __slots__ = ("_delay_s", "_draw", "_last", "_loop", "_source", "_target")

    def __init__(self, source: Core, target: Core, delay_s: tuple[float, float], draw: random.Random) -> None:
        self._source, self._target, self._delay_s, self._draw = source, target, delay_s, draw
        self._loop = asyncio.get_running_loop()
        self._last = 0.0

    def send(self, costs_s: float, deliver: Callable[..., None], *what: Any) -> None:
        """Send a frame. `costs_s`: core seconds of such a frame at each end."""
        now = self._loop.time()
        self._source.frames += 1
        sent = self._source.done_at(now, costs_s)
        most_s = self._delay_s[1]
        arrives = sent + (self._draw.uniform(*self._delay_s) if most_s else 0.0)
        if arrives <= now:
            deliver(*what)
            return
        self._last = max(arrives, self._last + _IN_ORDER_S)
        self._loop.call_at(self._last, self._arrive, costs_s, deliver, *what)

    def _arrive(self, costs_s: float, deliver: Callable[..., None], *what: Any) -> None:
        done = self._target.done_at(self._loop.time(), costs_s)
        self._loop.call_at(done, deliver, *what)


class ReplicaEnd:
    """A Router's connection, as `RunLoop` sees it."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel

    def hang_up(self) -> None:
        self._channel.breaks()

    def send(self, report: Report) -> None:
        channel = self._channel
        if not channel.closed:
            items = report.answers + len(report.refused)
            channel.back.send(channel.costs.of_frame(items), channel.deliver, report)


class MemoryChannel(Channel):
    """The real channel, except that frames are passed on without encoding. `core`: the Router's."""

    def __init__(
        self,
        lines: tuple[Line, Line],
        core: Core,
        runner: RunLoop,
        costs: Costs,
        on_report: Callable[[Report], None],
        on_lost: Callable[[list[PendingOffer]], None],
    ) -> None:
        super().__init__(on_report, on_lost)
        self.there, self.back = lines
        self.costs = costs
        self.closed = False
        self._core, self._runner = core, runner
        self._end = ReplicaEnd(self)

    @property
    def is_open(self) -> bool:
        return not self.closed

    def _flush(self) -> None:
        out, self._out, self._out_bytes = self._out, Offers(), 0
        if not self.closed:
            self.there.send(self.costs.of_frame(len(out.offers)), self._runner.receive, self._end, out)

    def deliver(self, report: Report) -> None:
        """Deliver each answer to its task once the Router has handled the earlier ones."""
        if self.closed:
            return
        answers = report.answered
        if not self.costs.of_answer or not answers:
            self.hear(report)
            return
        report.answered = []
        self.hear(report)
        now = self._loop.time()
        for answer in chain(*answers):
            self._loop.call_at(self._core.done_at(now, self.costs.of_answer), self._answered, answer)

    def _answered(self, answer: Answered) -> None:
        if (pending := self.pending.get(answer.number)) is not None:
            pending.answer(answer)
            self._drop_ended(pending)

    def close(self) -> None:
        """Close the channel. The replica learns of it like of a frame."""
        self.closed = True
        self.there.send(0.0, self._runner.gone, self._end)

    def breaks(self) -> None:
        """Break the connection at both ends."""
        if not self.closed:
            self.close()
            self._loop.call_soon(self.connection_lost, None)
