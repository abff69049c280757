"""jina-embeddings-v2 in plain float64, from the paper (arXiv 2310.19923): for one text, no batches, no masks.

BERT without positions; symmetric ALiBi (2108.12409): a score of positions i and j loses slope * |i - j|; the MLP is
gated (GLU, 2002.05202) by gelu or relu. The model for code also normalises queries and keys.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf)


def gelu(x):
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def relu(x):
    return np.maximum(x, 0)


def slopes(heads):
    """ALiBi's slopes: the geometric series with start and ratio 2 ** (-8 / n). For 12 heads: that of 8, and then every
    second one of 16, from the first.
    """
    if math.log2(heads).is_integer():
        return [(2 ** (-8 / heads)) ** k for k in range(1, heads + 1)]
    below = 2 ** int(math.log2(heads))
    return slopes(below) + slopes(2 * below)[0::2][: heads - below]


class Jina:
    def __init__(self, config, weights):
        self.config = config
        self.weights = {name: weight.numpy().astype(np.float64) for name, weight in weights.items()}

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)

    def norm(self, name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["layer_norm_eps"])
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attention(self, name, x):
        q, k, v = (self.linear(f"{name}.self.{part}", x) for part in ("query", "key", "value"))
        if f"{name}.self.layer_norm_q.weight" in self.weights:
            q, k = self.norm(f"{name}.self.layer_norm_q", q), self.norm(f"{name}.self.layer_norm_k", k)
        heads = self.config["num_attention_heads"]
        size = x.shape[1] // heads
        distance = np.abs(np.arange(len(x))[:, None] - np.arange(len(x)))
        mixed = []
        for head, slope in enumerate(slopes(heads)):
            part = slice(head * size, (head + 1) * size)
            scores = q[:, part] @ k[:, part].T / math.sqrt(size) - slope * distance
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(shares / shares.sum(-1, keepdims=True) @ v[:, part])
        return self.norm(f"{name}.output.LayerNorm", self.linear(f"{name}.output.dense", np.concatenate(mixed, 1)) + x)

    def layer(self, name, x):
        kind = self.config["feed_forward_type"]
        activation = relu if kind == "reglu" else gelu
        mixed = self.attention(f"{name}.attention", x)
        if f"{name}.layer_norm_1.weight" in self.weights:
            mixed = self.norm(f"{name}.layer_norm_1", mixed + x)
            up, gate = np.split(self.linear(f"{name}.mlp.up_gated_layer", mixed), 2, -1)
            down = self.linear(f"{name}.mlp.down_layer", up * activation(gate))
            return self.norm(f"{name}.layer_norm_2", down + mixed)
        if kind == "original":
            wide = gelu(self.linear(f"{name}.intermediate.dense", mixed))
            return self.norm(f"{name}.output.LayerNorm", self.linear(f"{name}.output.dense", wide) + mixed)
        gate, up = np.split(self.linear(f"{name}.mlp.gated_layers", mixed), 2, -1)
        return self.norm(f"{name}.mlp.layernorm", self.linear(f"{name}.mlp.wo", activation(gate) * up) + mixed)

    def __call__(self, ids, types=0):
        """The vector of each token, float64 [tokens, hidden], of ids [tokens] and their types."""
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        x = self.norm("embeddings.LayerNorm", words + self.weights["embeddings.token_type_embeddings.weight"][types])
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(f"encoder.layer.{number}", x)
        return x
