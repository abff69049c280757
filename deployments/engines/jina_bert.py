"""jina-embeddings-v2 as a torch module with the names of its published weights: BERT with ALiBi and a gated MLP.

Source: Günther et al., Jina Embeddings 2 (arXiv 2310.19923), section 3; ALiBi: Press et al. (arXiv 2108.12409), made
symmetric for an encoder: `slope * |i - j|` is subtracted from a score. The model is published with its own code, which
current transformers cannot import. This module replaces that code. Imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from deployments.engines.packed.positions import alibi_slopes


class JinaBertConfig(BertConfig):  # type: ignore[no-untyped-call]
    """`feed_forward_type`: geglu, reglu, or original (BERT's). `qk_norm`: the variant for code, which normalizes
    queries and keys, and adds a block's input to its attention twice.
    """

    model_type = "jina_bert"
    feed_forward_type: str = "original"
    qk_norm: bool = False


class JinaBertModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Ids and mask, int64 [queries, tokens] -> `last_hidden_state`, float [queries, tokens, hidden]."""

    config_class = JinaBertConfig
    base_model_prefix = "bert"

    def __init__(self, config: JinaBertConfig, *, pooled: bool = False) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config.vocab_size, hidden),
                "token_type_embeddings": nn.Embedding(config.type_vocab_size, hidden),
                "LayerNorm": _norm(config),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(hidden, hidden)}) if pooled else None
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        word, kind = self.embeddings["word_embeddings"](input_ids), self.embeddings["token_type_embeddings"](types)
        x = self.embeddings["LayerNorm"](word + kind)
        at = torch.arange(input_ids.shape[1], device=x.device)
        slopes = torch.tensor(alibi_slopes(self.config.num_attention_heads), device=x.device)
        distance = (at[:, None] - at).abs()
        bias = -slopes[:, None, None] * distance
        seen = torch.where(attention_mask.bool(), 0.0, -torch.inf)
        bias = (bias + seen[:, None, None, :]).to(x.dtype)
        for layer in self.encoder["layer"].children():
            x = layer(x, bias)
        return BaseModelOutput(last_hidden_state=x)


class JinaBertForSequenceClassification(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Logits of each query's first token, as in BERT (jina-reranker-v1)."""

    config_class = JinaBertConfig
    base_model_prefix = "bert"

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config, pooled=True)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels or 1)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, **inputs: Any) -> SequenceClassifierOutput:
        first = self.bert(**inputs).last_hidden_state[:, 0]
        assert self.bert.pooler is not None
        return SequenceClassifierOutput(logits=self.classifier(self.bert.pooler["dense"](first).tanh()))


class _Layer(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self._heads, self._kind = config.num_attention_heads, config.feed_forward_type
        parts: dict[str, nn.Module] = {name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")}
        if config.qk_norm:
            parts |= {"layer_norm_q": _norm(config), "layer_norm_k": _norm(config)}
            self.layer_norm_1, self.layer_norm_2 = _norm(config), _norm(config)
            up, down = nn.Linear(hidden, 2 * wide, bias=False), nn.Linear(wide, hidden)
            self.mlp = nn.ModuleDict({"up_gated_layer": up, "down_layer": down})
        elif self._kind == "original":
            self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, wide)})
            self.output = nn.ModuleDict({"dense": nn.Linear(wide, hidden), "LayerNorm": _norm(config)})
        else:
            up, down = nn.Linear(hidden, 2 * wide, bias=False), nn.Linear(wide, hidden)
            self.mlp = nn.ModuleDict({"gated_layers": up, "wo": down, "layernorm": _norm(config)})
        out = {"dense": nn.Linear(hidden, hidden), "LayerNorm": _norm(config)}
        self.attention: Any = nn.ModuleDict({"self": nn.ModuleDict(parts), "output": nn.ModuleDict(out)})
        self._activation = _activation(config)
        self._qk_norm = config.qk_norm

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
        out = self.attention["output"]
        mixed = out["LayerNorm"](out["dense"](self._attend(x, bias)) + x)
        if self._qk_norm:
            mixed = self.layer_norm_1(mixed + x)
            up, gate = self.mlp["up_gated_layer"](mixed).chunk(2, -1)
            return self.layer_norm_2(self.mlp["down_layer"](up * self._activation(gate)) + mixed)
        if self._kind == "original":
            wide = self._activation(self.intermediate["dense"](mixed))
            return self.output["LayerNorm"](self.output["dense"](wide) + mixed)
        gate, up = self.mlp["gated_layers"](mixed).chunk(2, -1)
        return self.mlp["layernorm"](self.mlp["wo"](self._activation(gate) * up) + mixed)

    def _attend(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        part = self.attention["self"]
        q, k, v = part["query"](x), part["key"](x), part["value"](x)
        if self._qk_norm:
            q, k = part["layer_norm_q"](q), part["layer_norm_k"](k)
        q, k, v = (each.unflatten(-1, (self._heads, -1)).transpose(1, 2) for each in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


def _norm(config: JinaBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _activation(config: JinaBertConfig) -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN[{"geglu": "gelu", "reglu": "relu"}.get(config.feed_forward_type, config.hidden_act)]


AutoConfig.register("jina_bert", JinaBertConfig)
AutoModel.register(JinaBertConfig, JinaBertModel)
AutoModelForSequenceClassification.register(JinaBertConfig, JinaBertForSequenceClassification)
