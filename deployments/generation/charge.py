"""What a generation costs its client: the prompt when it is requested, then each token as it comes. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deployments.admission.quota import Charge
from deployments.generation.scheduler.state import StepState
from deployments.generation.scheduler.step_time import StepLoad, StepTime
from deployments.serving.frames import known


@dataclass(slots=True, eq=False)
class GenerationCharge(Charge):
    """The charge for one generation. Device seconds are estimated with the replica's model of a step. The fixed time of
    a step is divided among its answers. `scored`: see `scheduler.sequences.Generation`.
    """

    prompt_tokens: int = 0
    scored: bool = False
    tokens: Counter[int] = field(default_factory=Counter)  # tokens so far, by answer
    device_s: float = 0.0

    def prompt(self, state: StepState) -> None:
        """Charge the prompt, as a replica in that state computes it, in place of what was charged so far."""
        self.settle(0.0)
        load = StepLoad().with_chunk(0, self.prompt_tokens, scored=self.scored)
        self._spend(self.prompt_tokens, known(StepTime, state.model), load, state)

    def refund_cached(self, state: StepState, tokens: int) -> None:
        """Refund the device seconds of the prompt's first `tokens` tokens, which the cache held. A quota of tokens
        counts them.
        """
        model, load = known(StepTime, state.model), StepLoad().with_chunk(0, tokens)
        device_s = state.slowdown * (model.seconds(load) - model.beta_s)
        self.device_s -= device_s
        if self.quota is None or self.quota.unit != "tokens":
            self.pay(-device_s)

    def came(self, state: StepState, answer: int) -> None:
        """Charge one more token of that answer."""
        model, rows = known(StepTime, state.model), max(1, state.rows)
        load = StepLoad(kv_tokens=self.prompt_tokens + self.tokens[answer])
        self.tokens[answer] += 1
        self._spend(1, model, load, state, model.seconds(StepLoad(rows=rows)) / rows)

    def _spend(self, tokens: int, model: StepTime, load: StepLoad, state: StepState, own_s: float = 0.0) -> None:
        device_s = state.slowdown * (own_s + model.seconds(load) - model.beta_s)
        self.device_s += device_s
        self.pay(tokens if self.quota is not None and self.quota.unit == "tokens" else device_s)

    def settle(self, total: float) -> None:
        Charge.settle(self, total)
        self.device_s = 0.0
