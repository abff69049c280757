"""The cost model: the device seconds of a query, by its tokens, and of a run of several; and its refits. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.admission.least_squares import non_negative

QUERY_TOKENS = 75  # length of the paper's query; alpha is its cost
_LEAST_S = 1e-9  # a rounding error
_KEPT, _EVERY = 128, 32  # runs that are kept; new runs after which the costs are refitted
_DOUBT = 0.1  # weight of the costs in force: each part counts like a tenth of its share of an average run's time
_OTHER, _LENGTHS = 0.03, (8, QUERY_TOKENS, 512)  # a model is replaced if a cost at one of these lengths differs by more

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
        seconds = np.array([max(took_s, _LEAST_S) for _, took_s in runs])
        columns = np.array([[len(one), one.sum(), np.square(one).sum(), 1.0] for one in lengths]) / seconds[:, None]
        if len(set(np.concatenate(lengths))) == 1:
            columns[:, [0, 2]] = 0.0  # queries of one length do not tell what depends on it: the cost is per token
        query_s, token_s, token2_s, beta_s = non_negative(columns, np.ones(len(runs))).tolist()
        model = cls(query_s, token_s, token2_s, beta_s)
        return model if model.alpha_s > _LEAST_S else cls(0.0, 1 / float(columns[:, 1].max()), 0.0, beta_s)


@dataclass(slots=True)
class CostFit:
    """Refits the costs of queries by length to the latest runs of one device.

    Only the shape of the costs is fitted: the total work of all these runs stays the same. The predictor learns the
    scale of the costs and the time that a run takes besides. What the runs cannot tell, for example if all queries have
    one length, stays as it was: the costs in force, at the scale of the runs, count as observations of a small weight.
    """

    # For each run: the number of queries, the sums of tokens and of squared tokens, and 1, all divided by its seconds.
    _rows: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _new: int = 0

    def forget(self) -> None:
        """Forget all runs. The device has changed speed, so runs before and after cannot be compared by lengths."""
        self._rows.clear()
        self._new = 0

    def ended(self, model: CostModel, lengths: Sequence[int], seconds: float) -> CostModel:
        """Take a run of queries of these lengths. Returns the model to use from now on."""
        sums = len(lengths), sum(lengths), sum(one * one for one in lengths), 1.0
        self._rows.append([one / max(seconds, _LEAST_S) for one in sums])
        self._new += 1
        if self._new < _EVERY:
            return model
        self._new = 0
        rows, costs = np.array(self._rows), np.array([model.query_s, model.token_s, model.token2_s])
        slope, beta_s = non_negative(np.stack([rows[:, :3] @ costs, rows[:, 3]], axis=1), np.ones(len(rows)))
        if min(slope, beta_s) < _LEAST_S:
            return model  # no work, or runs of one size: a query's part of the time cannot be told
        known, shares = np.append(slope * costs, beta_s), _DOUBT * rows.mean(axis=0)
        columns = np.vstack([rows, np.diag(shares)])
        found = non_negative(columns, np.append(np.ones(len(rows)), shares * known))
        works = (rows[:, :3] / rows[:, 3:]).sum(axis=0)
        if (work := float(works @ found[:3])) <= 0:
            return model
        query_s, token_s, token2_s = (found[:3] * (works @ costs) / work).tolist()
        fitted = CostModel(query_s, token_s, token2_s, model.beta_s)
        is_other = any(abs(fitted.cost(one) / model.cost(one) - 1) > _OTHER for one in _LENGTHS)
        return fitted if is_other else model
