"""How long a step takes, by the answers that it continues, the cache that they read, and the prompts that it computes;
and how long the host's attention takes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from deployments.admission.least_squares import non_negative

_KNEES = (0, *(2**power for power in range(2, 10)))  # knees that the fit tries first
_FINER = 8  # then it divides the range between the best one's neighbors by 8, again and again down to single rows


class StepLoad(NamedTuple):
    """What a step computes.

    - `rows`: answers that get one more token, and tokens of prompts whose log probabilities are wanted: the head and
      the choice of tokens cost as much for them. `kv_tokens`: tokens that the answers read from the cache.
    - `prompt_tokens`: tokens of all chunks of other prompts.
    - `pairs`: pairs of a prompt token and a token that it attends to: the sum of p (c + p / 2) over chunks of p tokens
      after c.
    - `copied_s`: seconds of copies between the memories, for prompts whose keys and values the host holds.
    """

    rows: float = 0
    kv_tokens: float = 0
    prompt_tokens: float = 0
    pairs: float = 0
    copied_s: float = 0

    def with_chunk(self, start: int, tokens: int, copy_token_s: float = 0.0, *, scored: bool = False) -> StepLoad:
        """Add `tokens` tokens of a prompt after its first `start`. `copy_token_s`: if the host holds its keys and
        values, seconds to copy those of a token: the first tokens' come to the accelerator, and the new ones' go back.
        `scored`: their log probabilities are wanted.
        """
        pairs = self.pairs + tokens * (start + tokens / 2)
        copied_s = self.copied_s + copy_token_s * (start + tokens)
        rows, prompt_tokens = (tokens, 0) if scored else (0, tokens)
        return StepLoad(self.rows + rows, self.kv_tokens, self.prompt_tokens + prompt_tokens, pairs, copied_s)

    def with_piece(self, start: int, tokens: int, copy_token_s: float = 0.0, *, scored: bool = False) -> StepLoad:
        """Add a chunk as an engine sees it: a chunk of one token is a row, wherever it comes from."""
        return self.with_row(start + 1) if tokens == 1 else self.with_chunk(start, tokens, copy_token_s, scored=scored)

    def with_row(self, tokens: int) -> StepLoad:
        """Add an answer that reads `tokens` tokens, including its own."""
        return self._replace(rows=self.rows + 1, kv_tokens=self.kv_tokens + tokens)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step takes `beta_s + row_s B + kv_token_s K + prompt_token_s p + pair_s sum p (c + p / 2)` seconds, where B, K,
    p and the sum are the fields of `StepLoad`. `beta_s` covers reading the weights once. In that time a step computes
    its first `knee` rows and prompt tokens for free, rows first. No number is negative.
    """

    beta_s: float
    row_s: float
    kv_token_s: float
    prompt_token_s: float
    pair_s: float
    knee: int = 0

    def seconds(self, load: StepLoad) -> float:
        """Seconds of a step with this load."""
        return self.linear_s(load) + self.attention_s(load)

    def linear_s(self, load: StepLoad) -> float:
        """Its seconds without attention, over all layers: T_l of NEO (arXiv:2411.01142), T_gl of APEX (2506.03296)."""
        spare = self.knee - load.rows
        row_s = self.row_s * -spare if spare < 0 else 0.0
        prompt_s = self.prompt_token_s * max(0.0, load.prompt_tokens - max(0.0, spare))
        return self.beta_s + row_s + prompt_s

    def attention_s(self, load: StepLoad) -> float:
        """Its seconds of attention, over all layers: T_ga of both papers. Includes the copies that it waits for."""
        return self.kv_token_s * load.kv_tokens + self.pair_s * load.pairs + load.copied_s

    def most_tokens(
        self, load: StepLoad, start: int, tokens: int, within_s: float, copy_token_s: float = 0.0, *,
        scored: bool = False,
    ) -> int:  # fmt: skip
        """How many of a prompt's `tokens` tokens after its first `start` fit into a step that has this load and takes
        at most `within_s`. `copy_token_s`, `scored`: see `StepLoad.with_chunk`.
        """

        def fits(some: int) -> bool:
            return self.seconds(load.with_chunk(start, some, copy_token_s, scored=scored)) <= within_s

        if fits(tokens):
            return tokens
        low, high = 0, tokens
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    @classmethod
    def fit(cls, steps: Iterable[tuple[StepLoad, float]]) -> Self:
        """Fit measured steps and their seconds by non-negative least squares of relative errors, and search for the
        best knee. If no step had more than `knee` rows, a row costs as much as a prompt token.

        Raises ValueError without steps.
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
        rows, kv_tokens, prompt_tokens, pairs, _ = loads.T
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
    """How long a host's processors take for the attention of answers whose keys and values they hold (T_ca of NEO):
    `row_s` seconds per answer, and `kv_token_s` per token that it reads, over all `layers`. `copy_token_s`: seconds to
    copy a token's keys and values in all layers from one memory to the other. No number is negative.
    """

    row_s: float
    kv_token_s: float
    copy_token_s: float = 0.0
    layers: int = 1

    def seconds(self, rows: float, kv_tokens: float) -> float:
        """Seconds of the attention of `rows` answers, which read `kv_tokens` tokens, in all layers."""
        return self.row_s * rows + self.kv_token_s * kv_tokens

    @classmethod
    def fit(cls, attention: Iterable[tuple[StepLoad, float]], copies: Iterable[tuple[int, float]], layers: int) -> Self:
        """Fit measured seconds of attention by non-negative least squares of relative errors. `copies`: copied tokens,
        and the seconds by which they made a step longer.

        Raises ValueError if no attention was measured.
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
