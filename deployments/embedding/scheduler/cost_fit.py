"""Refits the costs of queries by length to the device's own runs. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.admission.least_squares import non_negative
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel

_KEPT, _EVERY = 128, 32  # runs that are kept; new runs after which the costs are refitted
_DOUBT = 0.1  # weight of the costs in force: each part counts like a tenth of its share of an average run's time
_OTHER, _LENGTHS = 0.03, (8, QUERY_TOKENS, 512)  # a model is replaced if a cost at one of these lengths differs by more
_TINY = 1e-9  # a rounding error


@dataclass(slots=True)
class CostFit:
    """The latest runs of one device.

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
        self._rows.append([one / max(seconds, 1e-9) for one in sums])
        self._new += 1
        if self._new < _EVERY:
            return model
        self._new = 0
        rows, costs = np.array(self._rows), np.array([model.query_s, model.token_s, model.token2_s])
        slope, beta_s = non_negative(np.stack([rows[:, :3] @ costs, rows[:, 3]], axis=1), np.ones(len(rows)))
        if min(slope, beta_s) < _TINY:
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
