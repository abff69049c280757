"""A causal language model that computes steps: the decoder of `engines.packed`, its attention to the cache, and the
head that says how likely each word of the vocabulary comes next. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deployments.engines.packed.attention import CAUSAL, Attention, Heads, Reach
from deployments.engines.packed.families import decoder
from deployments.engines.packed.layers import Products, RmsNorm
from deployments.engines.packed.positions import Rotary
from deployments.engines.packed.tensors import Weights
from deployments.generation.engine.cache import Cache, Turned
from deployments.generation.engine.step import StepLayout
from deployments.generation.kernels.packed_products import products_for
from deployments.generation.kernels.row_kernels import kernel_norm
from deployments.generation.scheduling.chunk import Chunk

FAMILIES = {"llama", "qwen2", "qwen3"}  # by the config's model_type


def unsupported(config: Any) -> str | None:
    """Why a model of this transformers config cannot generate here, or None."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} models are not generated with here, only {', '.join(sorted(FAMILIES))}"
    windows = [kind for kind in decoder.layer_kinds(config) if decoder.reach(config, kind) != CAUSAL]
    if windows:
        return f"layers of the kind {windows[0]} see less than all tokens before, which the cache cannot do yet"
    return decoder.unsupported(config)


class CausalModel:
    """Of a config that is not `unsupported`, with a cache of `blocks` blocks."""

    def __init__(self, config: Any, weights: Weights, blocks: int, products: Products | None = None) -> None:
        """`weights` are under the names of the class with a head; `products` are the quicker ones of this machine, if
        they are not given. Raises MissingWeight.
        """
        self._place = weights.place
        made: list[Cache] = []

        def attend(layer: int, heads: Heads, _: Reach, norm: RmsNorm | None, rotary: Rotary) -> Attention:
            if not made:  # who has how many heads is known here
                made.append(Cache(config.num_hidden_layers, heads, blocks, self._place))
            return made[0].attention(layer, heads, Turned(heads, norm, rotary, self._place))

        products = products or products_for(self._place)
        parts = decoder.build(config, weights.within("model"), attend=attend, products=products, norms=kernel_norm)
        self._embeddings = parts.embeddings()
        self._blocks = [build() for build in parts.blocks]
        assert parts.norm is not None
        self._norm = parts.norm()
        tied = "lm_head.weight" not in weights or config.tie_word_embeddings
        self._head = products.dense(weights, "model.embed_tokens" if tied else "lm_head")
        (self.cache,) = made

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Put the chunks' tokens into the cache, no two of one sequence. Returns float32 [chunks that are wanted,
        vocabulary]: the logits of each one's next token.
        """
        layout = StepLayout.of_chunks(chunks, self._place)
        ids = torch.from_numpy(np.concatenate([chunk.ids for chunk in chunks])).to(self._place.device)
        x = layout.add_spare(self._embeddings(ids, layout))
        for number, block in enumerate(self._blocks, 1):
            if number == len(self._blocks):
                layout.only(layout.last)
            x = block(x, layout)
        return self._head.floats(self._norm(x))[: len(layout.last)]
