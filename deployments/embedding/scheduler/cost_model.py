"""The cost model: the device seconds of a query, by its tokens, and of a run of several. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deployments.admission.least_squares import non_negative

QUERY_TOKENS = 75  # length of the paper's query; alpha is its cost
_LEAST_S = 1e-9  # a rounding error

MeasuredRun = tuple[Sequence[int], float]  # the tokens of each query of a run, and the run's seconds


@dataclass(frozen=True, slots=True)
class CostModel:
    """A query of n tokens costs `query_s + token_s * n + token2_s * n^2` device seconds. A run takes `beta_s` plus the
    sum of its queries' costs. All are in seconds, and none is negative.

    It extends Eq. 12 of WindVE to queries of any length: alpha is the cost of 75 tokens.
    """

    query_s: float
    token_s: float
    token2_s: float
    beta_s: float

    def cost(self, tokens: int) -> float:
        """Device seconds of one query."""
        return self.query_s + (self.token_s + self.token2_s * tokens) * tokens

    def work(self, lengths: Iterable[int]) -> float:
        """Total device seconds of queries of these lengths, without beta."""
        return sum(map(self.cost, lengths))

    @property
    def alpha_s(self) -> float:
        """Device seconds of a query of 75 tokens."""
        return self.cost(QUERY_TOKENS)

    @classmethod
    def of_curve(cls, alpha_s: float, beta_s: float) -> CostModel:
        """Eq. 12 alone: the cost is proportional to the tokens, and `alpha_s` at 75."""
        return cls(0.0, alpha_s / QUERY_TOKENS, 0.0, beta_s)

    @classmethod
    def fit(cls, runs: Sequence[MeasuredRun]) -> CostModel:
        """Fit measured runs by non-negative least squares of relative errors, so that an error of 10 % weighs the same
        for short and long runs. If longer runs took no longer, the cost of a token is unknown: it is then taken from
        the run with the most tokens per second. Raises ValueError without runs.
        """
        if not runs:
            raise ValueError("a cost model needs at least one run")
        lengths = [np.asarray(tokens, np.float64) for tokens, _ in runs]
        seconds = np.array([max(took_s, 1e-9) for _, took_s in runs])
        columns = np.array([[len(one), one.sum(), np.square(one).sum(), 1.0] for one in lengths]) / seconds[:, None]
        if len(set(np.concatenate(lengths))) == 1:
            columns[:, [0, 2]] = 0.0  # queries of one length do not tell what depends on it: the cost is per token
        query_s, token_s, token2_s, beta_s = non_negative(columns, np.ones(len(runs))).tolist()
        model = cls(query_s, token_s, token2_s, beta_s)
        return model if model.alpha_s > _LEAST_S else cls(0.0, 1 / float(columns[:, 1].max()), 0.0, beta_s)
