"""One pool of replicas that generate, as the Router sees it: a link to each, the soonest first."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deployments.errors import ReplicaLost
from deployments.generation.channel import Streaming, TokenChannel
from deployments.generation.frames import GenerationOffer, NewToken, TokenReport
from deployments.generation.scheduler.hybrid.host_cache import HostState
from deployments.generation.scheduler.hybrid.planner import MODES
from deployments.generation.view import QUIET_S, StepView
from deployments.serving.replica_set import FIRST_RETRY_S, LAST_RETRY_S, Followed, connected
from deployments.serving.wire import reach

_AWAY = 1.25  # a replica on another node counts as if its first token came so many times later
_HUNG_S = 1.5  # in which a replica that is counted out gives its state, if it lives


class GenerationLink:
    """A Router's connection to one replica. It reconnects until Serve says that the replica has gone. What was there
    when it breaks is lost: the replica drops it as the connection ends.
    """

    def __init__(self, pool: GenerationPool, replica: str, about: Mapping[str, Any], rank: tuple[bool, int]) -> None:
        self.view = StepView(replica, rank)
        self.about = about
        self._pool = pool
        self._channel: TokenChannel | None = None
        self._watching = False
        self._wait_s = 0.0  # before the next attempt to connect
        self._task = pool.spawn(self._connect())

    @property
    def is_live(self) -> bool:
        """It is connected, and the replica has reported its state."""
        return self._channel is not None and self.view.state is not None

    @property
    def streams(self) -> int:
        """Generations of this Router that are there."""
        return 0 if self._channel is None else len(self._channel.streams)

    def offer(self, offer: GenerationOffer, most_unread: int, on_token: Callable[[NewToken], None]) -> Streaming:
        """Send the offer. Only while `is_live`."""
        assert self._channel is not None
        streaming = self._channel.offer(offer, most_unread, on_token)
        self.view.sent(self._channel.frames, len(offer.ids))
        if not self._watching:
            self._watch()
        return streaming

    def call_off(self, streaming: Streaming) -> None:
        """Nobody waits for it any more. Does nothing to one that has ended."""
        if self._channel is not None:
            self._channel.call_off(streaming)

    def stop(self, streaming: Streaming, answer: int) -> None:
        """Nobody wants more of that answer."""
        if self._channel is not None:
            self._channel.stop(streaming, answer)

    def configure(self) -> None:
        """Send the pool's policy to the replica."""
        if self._channel is not None:
            self._channel.configure(self._pool.policy)

    def end(self) -> None:
        """Serve says that the replica has gone: dead, or drained."""
        self._task.cancel()
        if self._channel is not None:
            left, self._channel.streams = list(self._channel.streams.values()), {}
            self._channel.close()
            self._channel = None
            self._lose(left)

    def drain(self) -> bool:
        """Serve counts it out; what is there may still end. False where there is nothing, and the link has ended. One
        that says nothing any more is hung: Serve takes a while to end it.
        """
        if not self.streams:
            self.end()
            return False
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        self.view.asked(loop.time())
        self._channel.ask()
        loop.call_later(_HUNG_S, self._end_if_hung, context=contextvars.Context())
        return True

    def describe(self) -> dict[str, Any]:
        """As `/info` shows it; the channel's secret stays here."""
        state = self.view.state
        assert state is not None
        return {
            **self.about,
            "channel": f"port {self.about['channel']['port']}",
            "rows": state.rows,
            "waiting": state.waiting,
            "blocks": state.blocks,
            "free_blocks": state.free_blocks,
            "steps": state.steps,
            "opens_s": state.opens_s if math.isfinite(state.opens_s) else None,
            "factor": round(state.factor, 4),
            "margin": round(state.margin, 4),
            "refusals": list(state.refusals),
            **({} if state.host is None else {"host": _told(state.host)}),
        }

    def _watch(self) -> None:
        """Ask for its state while it says nothing of what it was sent."""
        self._watching = self._channel is not None and not self.view.has_read_all
        if self._channel is None or not self._watching:
            return
        loop = asyncio.get_running_loop()
        if self.view.should_be_asked(loop.time()):
            self.view.asked(loop.time())
            self._channel.ask()
        loop.call_later(QUIET_S, self._watch, context=contextvars.Context())

    def _end_if_hung(self) -> None:
        if self.view.is_silent(asyncio.get_running_loop().time()) and self._pool.drained(self):
            self.end()

    def _on_report(self, report: TokenReport) -> None:
        first = self.view.state is None
        self.view.hear(asyncio.get_running_loop().time(), report.state, report.seen, report.routers)
        if first:
            self._wait_s = 0.0
            self._pool.changed()

    def _on_lost(self, left: list[Streaming]) -> None:
        self._lose(left)
        if self._channel is None:
            return
        self._channel = None
        self.view.forget()
        self._pool.changed()
        if self._pool.links.get(self.view.replica) is self:
            self._task = self._pool.spawn(self._connect())
        else:
            self._pool.drained(self)

    def _lose(self, left: list[Streaming]) -> None:
        for streaming in left:
            streaming.fail(
                ReplicaLost(
                    f"the {self._pool.name} pool lost replica {self.view.replica} while it generated this answer; "
                    "please try again"
                )
            )

    async def _connect(self) -> None:
        """Until it is reached; its first report ends the wait."""
        at = self.about["channel"]
        await asyncio.sleep(self._wait_s)  # 0, unless the last connection broke before its first report
        self._wait_s = min(max(2 * self._wait_s, FIRST_RETRY_S), LAST_RETRY_S)
        address, secret = (at["host"], at["port"]), at["secret"]

        def make() -> TokenChannel:
            return TokenChannel(self._on_report, self._on_lost)

        who = f"the {self._pool.name} pool's replica {self.view.replica} at {at['host']}:{at['port']}"
        self._channel = await connected(lambda: reach(make, address, secret), who, lambda: None)
        self.configure()
        self._channel.ask()


class GenerationPool(Followed[GenerationLink]):
    """`name` is "accelerator" or "cpu". Call `configure` before `connect`."""

    policy: dict[str, Any]

    def link(self, replica: str, about: Mapping[str, Any], rank: tuple[bool, int]) -> GenerationLink:
        return GenerationLink(self, replica, about, rank)

    def configure(self, policy: Mapping[str, Any]) -> None:
        """Put a promise in force, and send it to every replica: `ttft_s`, `tpot_s` (s), `bulk_share` (0 to 1), `model`
        and `host`, the fields of a `StepTime` and of a `HostTime` in their order, or None: what the replica measured at
        its start.
        """
        self.policy = {"router": self.router_id, **policy}
        for link in self.links.values():
            link.configure()

    def soonest(self, now: float, tokens: int) -> Iterator[GenerationLink]:
        """The live replicas, the one first that would have the first token soonest; those that have stopped are left
        out. All that say they are open come before those that say when they are.
        """
        live = [link for link in self.live if not link.view.is_silent(now)]
        yield from sorted(
            live,
            key=lambda link: (
                link.view.opens_s(now) > 0,
                round(link.view.first_s(now, tokens) * (_AWAY if link.view.rank[0] else 1.0), 4),
                link.view.rank,
            ),
        )

    def describe(self) -> dict[str, Any]:
        """As `/info` shows it."""
        states = [link.view.state for link in self.live if link.view.state is not None]
        return {
            "live_replicas": len(self.live),
            "rows": sum(state.rows for state in states),  # of all Routers
            "waiting": sum(state.waiting for state in states),
            "free_blocks": sum(state.free_blocks for state in states),
            "blocks": min((state.blocks for state in states), default=None),  # of the replica that has the fewest
            "replicas": {link.view.replica: link.describe() for link in self.live},
        }


def _told(host: HostState) -> dict[str, Any]:
    """As `/info` shows a replica's host."""
    to_accelerator, to_host = host.moved
    share = host.gained_share
    return {
        "rows": host.rows,
        "parked": host.parked,
        "blocks": host.blocks,
        "free_blocks": host.free_blocks,
        "steps": dict(zip(MODES, host.steps, strict=True)),
        "tokens": host.tokens,
        "moved": {"to_accelerator": to_accelerator, "to_host": to_host},
        "gained_tokens": round(host.gained),
        "gained_share": None if share is None else round(share, 4),
        "factor": host.factor,
    }
