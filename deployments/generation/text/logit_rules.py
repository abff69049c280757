"""Rules that change an answer's logits before its next token is drawn: bias, penalties, a grammar, ... Pure.

They come in the order of vLLM and transformers: bias, penalties, least tokens, and what the grammar allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from deployments.generation.text.sampling import LogitRule, Numbers, Sampling


def rules_of(
    asked: Sampling, prompt: npt.NDArray[np.int32], end_tokens: Collection[int], grammar: LogitRule | None = None
) -> Iterator[LogitRule]:
    """The rules of an answer to these options. `prompt`: token ids, int32 [tokens]. `grammar`: that of its grammar."""
    if asked.logit_bias:
        yield _Bias(asked.logit_bias)
    if asked.repetition_penalty != 1 or asked.presence_penalty or asked.frequency_penalty:
        yield _Penalties(asked, prompt)
    if asked.min_tokens and end_tokens:
        yield _LeastTokens(asked.min_tokens, end_tokens)
    if grammar is not None:
        yield grammar


class _Bias:
    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self._tokens = np.array([token for token, _ in bias], np.intp)
        self._added = np.array([added for _, added in bias], np.float32)

    def alter(self, logits: Numbers, drawn: Sequence[int]) -> None:  # noqa: ARG002 - as the others
        logits[self._tokens] += self._added


class _Penalties:
    """`repetition_penalty` of transformers: positive logits of tokens of the prompt and the answer are divided by it,
    others multiplied. `frequency_penalty` and `presence_penalty` of OpenAI: each token of the answer loses the first as
    often as it was drawn, and the second once.
    """

    def __init__(self, asked: Sampling, prompt: npt.NDArray[np.int32]) -> None:
        self._asked, self._prompt = asked, prompt
        self._seen: npt.NDArray[np.bool_] | None = None  # [vocabulary], from the first token on
        self._counts: dict[int, int] = {}
        self._counted = 0

    def alter(self, logits: Numbers, drawn: Sequence[int]) -> None:
        if self._seen is None:
            self._seen = np.zeros(len(logits), np.bool_)
            self._seen[self._prompt] = True
        for token in drawn[self._counted :]:
            self._seen[token] = True
            self._counts[token] = self._counts.get(token, 0) + 1
        self._counted, asked = len(drawn), self._asked
        if (penalty := np.float32(asked.repetition_penalty)) != 1:
            seen = np.flatnonzero(self._seen)
            found = logits[seen]
            logits[seen] = np.where(found > 0, found / penalty, found * penalty)
        if asked.presence_penalty or asked.frequency_penalty:
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            less = asked.frequency_penalty * counts + asked.presence_penalty
            logits[np.fromiter(self._counts, np.intp, len(self._counts))] -= less.astype(np.float32)


class _LeastTokens:
    def __init__(self, least: int, end_tokens: Collection[int]) -> None:
        self._least, self._ends = least, np.array(sorted(end_tokens), np.intp)

    def alter(self, logits: Numbers, drawn: Sequence[int]) -> None:
        if len(drawn) < self._least:
            logits[self._ends] = -np.inf
