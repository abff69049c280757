"""What one step takes a device, by the answers it continues, the cache they read, and the prompts it computes; and what
the attention takes its host. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from deployments.admission.least_squares import non_negative

_KNEES = (0, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)  # that the fit tries first
_FINER = 8  # parts of what lies between the best one's neighbours; then again, until none is left out


class StepLoad(NamedTuple):
    """What a step computes. `rows`: answers that get one token more, and `kv_tokens` that these read from the cache;
    `prompt_tokens` of all chunks of prompts, and `pairs`: of those with the tokens that they see, sum of p (c + p / 2)
    for a chunk of p tokens behind c.
    """

    rows: float = 0
    kv_tokens: float = 0
    prompt_tokens: float = 0
    pairs: float = 0

    def with_chunk(self, start: int, tokens: int) -> StepLoad:
        """And so many tokens of a prompt, behind its first `start`."""
        pairs = tokens * (start + tokens / 2)
        return self._replace(prompt_tokens=self.prompt_tokens + tokens, pairs=self.pairs + pairs)

    def with_piece(self, start: int, tokens: int) -> StepLoad:
        """As an engine sees a chunk: one token is a row, wherever it comes from."""
        return self.with_row(start + 1) if tokens == 1 else self.with_chunk(start, tokens)

    def with_row(self, tokens: int) -> StepLoad:
        """And one answer more, which reads so many tokens, its own included."""
        return self._replace(rows=self.rows + 1, kv_tokens=self.kv_tokens + tokens)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step takes `beta_s + row_s B + kv_token_s K + prompt_token_s p + pair_s sum p (c + p / 2)` seconds: B, K, p and
    the sum are the fields of `StepLoad`. The first `knee` rows and tokens of a step cost nothing beside `beta_s`, for
    which the weights are read once; rows come before tokens of prompts. No number is negative.
    """

    beta_s: float
    row_s: float
    kv_token_s: float
    prompt_token_s: float
    pair_s: float
    knee: int = 0

    def seconds(self, load: StepLoad) -> float:
        """Of one step."""
        return self.linear_s(load) + self.attention_s(load)

    def linear_s(self, load: StepLoad) -> float:
        """Of it, all but the attention, over all layers: T_l of NEO (arXiv:2411.01142), T_gl of APEX (2506.03296)."""
        spare = self.knee - load.rows
        row_s = self.row_s * -spare if spare < 0 else 0.0
        prompt_s = self.prompt_token_s * max(0.0, load.prompt_tokens - max(0.0, spare))
        return self.beta_s + row_s + prompt_s

    def attention_s(self, load: StepLoad) -> float:
        """Of it, the attention, over all layers: T_ga of both papers."""
        return self.kv_token_s * load.kv_tokens + self.pair_s * load.pairs

    def most_tokens(self, load: StepLoad, start: int, tokens: int, within_s: float) -> int:
        """So many of the `tokens` of a prompt that come behind its first `start` fit into a step with this load that
        takes `within_s` at most.
        """
        if self.seconds(load.with_chunk(start, tokens)) <= within_s:
            return tokens
        low, high = 0, tokens
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.seconds(load.with_chunk(start, middle)) <= within_s
            low, high = (middle, high) if fits else (low, middle)
        return low

    @classmethod
    def fit(cls, steps: Iterable[tuple[StepLoad, float]]) -> Self:
        """Non-negative least squares over measured steps and their seconds, each weighted by its own time, for a few
        knees, then for those around the best of these; the best of all. Where no step had more than `knee` rows, a row
        costs what a prompt's token does.

        Raises ValueError for no steps.
        """
        measured = list(steps)
        if not measured:
            raise ValueError("the time of a step needs at least one measured step")
        seconds = np.array([max(took_s, 1e-9) for _, took_s in measured])
        loads = np.array([load for load, _ in measured], np.float64)
        tried: dict[int, tuple[float, Self]] = {}
        apart = 0
        knees: Sequence[int] = _KNEES
        while True:
            tried |= {knee: cls._with_knee(loads, seconds, knee) for knee in knees if knee not in tried}
            least = min(error for error, _ in tried.values())
            best = min(knee for knee, (error, _) in tried.items() if error <= least * (1 + 1e-6) + 1e-12)
            if apart == 1:
                return tried[best][1]
            low = max((knee for knee in tried if knee < best), default=best)
            high = min((knee for knee in tried if knee > best), default=best)
            apart = max(1, (high - low) // _FINER)
            knees = range(low, high, apart)

    @classmethod
    def _with_knee(
        cls, loads: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], knee: int
    ) -> tuple[float, Self]:
        """The squared error of the best fit, and the fit. `loads`: [steps, fields of `StepLoad`]."""
        rows, kv_tokens, prompt_tokens, pairs = loads.T
        behind = np.maximum(0.0, prompt_tokens - np.maximum(0.0, knee - rows))
        terms = [np.ones_like(rows), np.maximum(0.0, rows - knee), kv_tokens, behind, pairs]
        columns = np.stack(terms, axis=1) / seconds[:, None]
        found = non_negative(columns, np.ones(len(seconds)))
        error = float(np.square(columns @ found - 1).sum())
        if not columns[:, 1].any():
            found[1] = found[3]
        beta_s, row_s, kv_token_s, prompt_token_s, pair_s = found.tolist()
        return error, cls(beta_s, row_s, kv_token_s, prompt_token_s, pair_s, knee)


@dataclass(frozen=True, slots=True)
class HostTime:
    """What a host's processors take for the attention of answers whose keys and values they hold (T_ca of NEO):
    `row_s` seconds an answer and `kv_token_s` for each token that it reads, over all `layers`. `copy_token_s`:
    seconds to copy a token's keys and values, of all layers, from one memory to the other. No number is negative.
    """

    row_s: float
    kv_token_s: float
    copy_token_s: float = 0.0
    layers: int = 1

    def seconds(self, rows: float, kv_tokens: float) -> float:
        """Of so many answers' attention in all layers."""
        return self.row_s * rows + self.kv_token_s * kv_tokens

    @classmethod
    def fit(cls, attention: Iterable[tuple[StepLoad, float]], copies: Iterable[tuple[int, float]], layers: int) -> Self:
        """Of measured seconds of the attention, by its rows and the tokens that they read: non-negative least squares,
        each weighted by its own time. And of the seconds that steps took longer by so many copied tokens.

        Raises ValueError where no attention was measured.
        """
        measured, copied = list(attention), list(copies)
        if not measured:
            raise ValueError("the time of a host needs at least one measured attention")
        seconds = np.array([max(took_s, 1e-9) for _, took_s in measured])
        columns = np.array([(load.rows, load.kv_tokens) for load, _ in measured], np.float64) / seconds[:, None]
        row_s, kv_token_s = non_negative(columns, np.ones(len(seconds))).tolist()
        tokens = sum(count for count, _ in copied)
        copy_token_s = max(0.0, sum(more_s for _, more_s in copied)) / max(1, tokens)
        return cls(row_s, kv_token_s, copy_token_s, layers)
