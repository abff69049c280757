"""A causal language model that computes steps: the decoder of `engines.packed`, attention to the cache, and the head
that computes the logits of the next token. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from deployments.engines.packed.attention import CAUSAL, Attention, HeadLayout, Reach
from deployments.engines.packed.families import decoder
from deployments.engines.packed.layers import PreNorm, Products, RmsNorm
from deployments.engines.packed.positions import Rotary
from deployments.engines.packed.tensors import Place, Weights
from deployments.generation.engine.cache import Cache, CachedAttention, Turned
from deployments.generation.engine.packed_step import StepLayout
from deployments.generation.engine.scoring import scored
from deployments.generation.kernels.packed_products import PackedProducts, products_for
from deployments.generation.kernels.row_kernels import kernel_norm
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.work import Chunk
from deployments.generation.text.prompt_scores import PromptScores

_CPU = torch.device("cpu")
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
    """A model, from a config that is not `unsupported`, with a cache of `blocks` blocks and one of `num_cpu_blocks`
    blocks in the host's memory. Each block has room for `block_size` tokens.
    """

    def __init__(
        self, config: Any, weights: Weights, blocks: int, products: Products | None = None, *, num_cpu_blocks: int = 0,
        block_size: int = BLOCK,
    ) -> None:  # fmt: skip
        """`weights`: named as in the class with a head. `products`: None picks the faster ones on this machine. Raises
        MissingWeight.
        """
        self.place, self.vocabulary = weights.place, config.vocab_size
        made: list[Cache] = []
        self.turned: list[Turned] = []  # for each layer, the norm and rotation of query and key
        self.attention: list[CachedAttention] = []
        self.host_attention: list[CachedAttention] = []

        def attend(layer: int, heads: HeadLayout, _: Reach, norm: RmsNorm | None, rotary: Rotary) -> Attention:
            if not made:  # the heads are known only here
                made.append(Cache(config.num_hidden_layers, heads, blocks, self.place, block_size))
                on_host = Place(_CPU, self.place.dtype)
                pinned = self.place.device.type == "cuda"
                made.append(Cache(config.num_hidden_layers, heads, num_cpu_blocks, on_host, block_size, pinned=pinned))
            self.turned.append(Turned(heads, norm, rotary, self.place))
            self.attention.append(made[0].attention(layer, heads, self.turned[-1]))
            self.host_attention.append(made[1].attention(layer, heads))
            return self.attention[-1]

        products = products or products_for(self.place)
        in_c = isinstance(products, PackedProducts) and products.computes(config.hidden_act)
        self._padded = self.place.device.type == "cpu" and not in_c
        parts = decoder.build(config, weights.within("model"), attend=attend, products=products, norms=kernel_norm)
        self._embeddings = parts.embeddings()
        self.layers = [cast("PreNorm", build()) for build in parts.blocks]
        assert parts.norm is not None
        self._norm = parts.norm()
        tied = "lm_head.weight" not in weights or config.tie_word_embeddings
        self._head = products.dense(weights, "model.embed_tokens" if tied else "lm_head")
        self.cache, self.host_cache = made

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute chunks, at most one per sequence, and put their keys and values into the cache. Returns the logits of
        the next tokens, float32 [wanted chunks, vocabulary].
        """
        return self.compute(self._layout(chunks))

    @torch.inference_mode()
    def scored_step(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, list[PromptScores]]:
        """As `step`, if some chunks have `scoring`. Returns their scores, too."""
        return self.scored(self._through(self._layout(chunks)), chunks)

    def _layout(self, chunks: Sequence[Chunk]) -> StepLayout:
        return StepLayout.of_chunks(chunks, self.place, self.cache.block_size, padded=self._padded)

    def compute(self, layout: StepLayout) -> torch.Tensor:
        """`step` for a layout."""
        return self.head(self._through(layout))[: len(layout.last)]

    def _through(self, layout: StepLayout) -> torch.Tensor:
        """What the last layer returns for the rows `last`, and for spare ones, [rows, width]."""
        x = layout.add_spare(self.embed(layout))
        for number, layer in enumerate(self.layers, 1):
            if number == len(self.layers) and len(layout.last) < layout.tokens:
                layout.only(layout.last)
            x = layer(x, layout)
        return x

    def embed(self, layout: StepLayout) -> torch.Tensor:
        """The embeddings of the step's tokens, [tokens, width]."""
        return self._embeddings(layout.ids, layout)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """The norm and head after the last layer: [tokens, width] -> logits float32 [tokens, vocabulary]."""
        return self._head.floats(self._norm(x))

    def scored(self, x: torch.Tensor, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, list[PromptScores]]:
        """The logits after the last layer and the scores. See `scoring.scored`."""
        return scored(self.head, self.vocabulary, x, chunks)
