"""The proof: streams of requests with the found step times in force, timed by a client that reads their tokens.

What is admitted keeps both promises, first token and pace; the rest is told busy.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from calibration.generation.request_capacity import Arrival, Mix
from calibration.generation.token_stream import ClientStream
from calibration.service.application import CalibrationFailed
from deployments.generation.scheduler.state import StepPolicy

REQUIRED = 0.995  # of what is admitted, each promise
LOADS = ((1.0, False), (1.5, False), (1.5, True))  # times the capacity; in bursts
_FIRSTS, _SHORTEST_S = 5, 8.0  # how long requests come: times `ttft_s`; and until there are `_FEWEST`,
_FEWEST, _LONGEST_S = 50, 120.0  # if that takes no longer
_ATTEMPTS = 2
_IDS = range(5, 100)  # that every vocabulary has


@dataclass(frozen=True, slots=True)
class PromiseStream:
    """Requests of a mix, `rate` a second, `times` the capacity; `together`: so many come at once."""

    times: float
    rate: float
    together: int = 1

    @classmethod
    def of(cls, times: float, capacity: float, ttft_s: float, *, bursts: bool) -> PromiseStream:
        """Bursts are of what comes within `ttft_s`, and of two at least."""
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
    """What a client saw of one stream: of what was admitted, seconds to each first token, and the mean seconds between
    the tokens of each answer that has several.
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
        """Of few, one may be late: so few cannot show a share."""
        late = ((self.late_firsts, self.firsts_s), (self.late_paces, self.paces_s))
        return all(count <= max(1, (1 - REQUIRED) * len(every)) for count, every in late)

    def check(self, policy: StepPolicy) -> None:
        """Raises CalibrationFailed where too much was late."""
        if not self.held:
            raise CalibrationFailed(
                f"the promise does not hold for a {self.stream.name}: {self.late_firsts} of {len(self.firsts_s)} first "
                f"tokens came after {policy.ttft_s:g} s (the last after {max(self.firsts_s):.3g} s) and "
                f"{self.late_paces} of {len(self.paces_s)} answers were slower than {policy.tpot_s:g} s a token; "
                "nothing was written. Calibrate when it is quiet, or loosen ttft_s and tpot_s"
            )

    @classmethod
    def of(cls, stream: PromiseStream, came: Sequence[ClientStream], policy: StepPolicy) -> PromiseProof:
        """Raises CalibrationFailed where a request fails, or none is admitted."""
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
    """Send the stream, once more where too much is late; what the last one shows. Raises CalibrationFailed where
    requests fail.
    """
    for _ in range(_ATTEMPTS):
        found = PromiseProof.of(stream, await send(arrivals), policy)
        if found.held:
            break
    return found


def payload(model: str, arrival: Arrival, seed: int) -> dict[str, object]:
    """A streamed completion of a prompt that means nothing, whose answer has just so many tokens."""
    draw = random.Random(seed)  # noqa: S311 - a prompt that means nothing
    return {
        "model": model,
        "prompt": draw.choices(_IDS, k=arrival.prompt_tokens),
        "max_tokens": arrival.answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
