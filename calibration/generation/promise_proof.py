"""The proof: streams of requests while the new step times are in force, timed by a client that reads the tokens.

Admitted requests must keep both promises: the first token and the time per output token. The others are refused.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from calibration.generation.request_capacity import Arrival, Mix
from calibration.generation.token_stream import ClientStream
from calibration.service.application import CalibrationFailed
from deployments.generation.scheduler.state import StepPolicy

REQUIRED = 0.995  # share of the admitted requests that must keep each promise
LOADS = ((1.0, False), (1.5, False), (1.5, True))  # (times the capacity, in bursts)
_FIRSTS, _SHORTEST_S = 5, 8.0  # length of a stream, in `ttft_s`, and at least; it goes on until `_FEWEST` requests
_FEWEST, _LONGEST_S = 50, 120.0  # are sent, but no longer than `_LONGEST_S`
_ATTEMPTS = 2
_IDS = range(5, 100)  # token ids that every vocabulary has


@dataclass(frozen=True, slots=True)
class PromiseStream:
    """A stream of requests of a mix: `rate` per second, which is `times` the capacity; `together` arrive at once."""

    times: float
    rate: float
    together: int = 1

    @classmethod
    def of(cls, times: float, capacity: float, ttft_s: float, *, bursts: bool) -> PromiseStream:
        """A burst has the requests of one `ttft_s`, and at least two."""
        rate = times * capacity
        return cls(times, rate, max(2, round(rate * ttft_s)) if bursts else 1)

    @property
    def name(self) -> str:
        kind = "stream" if self.together == 1 else f"stream of bursts of {self.together}"
        return f"{kind} at {self.times:g} x capacity"

    def arrivals(self, mix: Mix, ttft_s: float, seed: int) -> list[Arrival]:
        seconds = max(_SHORTEST_S, _FIRSTS * ttft_s, min(_LONGEST_S, _FEWEST / self.rate))
        return mix.arrivals(self.rate, seconds, seed, together=self.together)


@dataclass(frozen=True, slots=True)
class PromiseProof:
    """What the client saw of one stream. Of the admitted requests: seconds to each first token, and mean seconds
    between the tokens of each answer with several.
    """

    stream: PromiseStream
    sent: int
    busy: int
    firsts_s: tuple[float, ...]
    paces_s: tuple[float, ...]
    late_firsts: int
    late_paces: int

    @property
    def held(self) -> bool:
        """Whether enough were in time. Among few requests, one may be late, because so few cannot show a share."""
        late = ((self.late_firsts, self.firsts_s), (self.late_paces, self.paces_s))
        return all(count <= max(1, (1 - REQUIRED) * len(every)) for count, every in late)

    def check(self, policy: StepPolicy) -> None:
        """Raises CalibrationFailed if too many were late."""
        if not self.held:
            raise CalibrationFailed(
                f"the promise does not hold for a {self.stream.name}: {self.late_firsts} of {len(self.firsts_s)} first "
                f"tokens came after {policy.ttft_s:g} s (the last after {max(self.firsts_s):.3g} s) and "
                f"{self.late_paces} of {len(self.paces_s)} answers were slower than {policy.tpot_s:g} s per token; "
                "nothing was written. Calibrate when traffic is low, or increase ttft_s and tpot_s"
            )

    @classmethod
    def of(cls, stream: PromiseStream, came: Sequence[ClientStream], policy: StepPolicy) -> PromiseProof:
        """Raises CalibrationFailed if a request fails, or none is admitted."""
        admitted = [one for one in came if one.status == 200]
        busy = sum(one.status == 429 for one in came)
        failed = [one for one in came if one.status != 429 and (one.error is not None or one.first_s is None)]
        if failed or not admitted:
            why = f" (one with {failed[0].status or 'no status'}: {failed[0].error or 'no token'})" if failed else ""
            raise CalibrationFailed(
                f"{len(failed)} of {len(came)} requests of a {stream.name} failed{why} and {len(admitted)} were "
                "admitted: nothing was written"
            )
        firsts = [one.first_s for one in admitted if one.first_s is not None]
        paces = [
            (one.last_s - one.first_s) / (one.tokens - 1)
            for one in admitted
            if one.tokens > 1 and one.first_s is not None and one.last_s is not None
        ]
        return cls(
            stream,
            len(came),
            busy,
            tuple(firsts),
            tuple(paces),
            sum(first_s > policy.ttft_s for first_s in firsts),
            sum(pace_s > policy.tpot_s for pace_s in paces),
        )


async def prove(
    stream: PromiseStream,
    arrivals: Sequence[Arrival],
    policy: StepPolicy,
    send: Callable[[Sequence[Arrival]], Awaitable[Sequence[ClientStream]]],
) -> PromiseProof:
    """Send the stream, and once more if too many are late. Returns the last proof. Raises CalibrationFailed if requests
    fail.
    """
    for _ in range(_ATTEMPTS):
        found = PromiseProof.of(stream, await send(arrivals), policy)
        if found.held:
            break
    return found


def payload(model: str, arrival: Arrival, seed: int) -> dict[str, object]:
    """The body of a streamed completion with a random prompt, whose answer has exactly the arrival's tokens."""
    draw = random.Random(seed)  # noqa: S311 - a random prompt
    return {
        "model": model,
        "prompt": draw.choices(_IDS, k=arrival.prompt_tokens),
        "max_tokens": arrival.answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
