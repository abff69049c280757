"""A Router without replicas: it answers at once with constant results, and records the requests."""

import dataclasses

import numpy as np

from deployments.embedding.request import Embedded
from deployments.errors import WrongKind
from deployments.models.model_files import ModelCard
from deployments.models.outputs import pack
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Token
from deployments.settings import Settings

VECTORS = np.array([[0.6, 0.8, 0, 0], [0.8, 0.6, 0, 0]], np.float32)
TOKENS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)  # of each text
MULTI = [np.array([[0.6, 0.8], [0, 1], [1, 0]], np.float32), np.array([[0.8, 0.6]], np.float32)]
ANSWERS = {  # answers to the first query, the second, and so on; by output, or by the kind of model
    "embedding": VECTORS,
    "tokens": [TOKENS, TOKENS],
    "reranker": np.array([[-1.5], [2.25], [0.0]], np.float32),
    "classifier": np.array([[1, 3, -2], [0, 0, 0], [700, -700, 0]], np.float32),
    "sparse": pack(np.array([[0, 0.1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1]], np.float32)),
    "multi_vector": MULTI,
}
LABELS = {"reranker": ("LABEL_0",), "classifier": ("bad", "good", "so so")}
SPACE = "5bace5bace5bace5"
LIMITS = {"max_body_bytes": 1000, "max_inputs_per_request": 3}


def asked_of(request):
    """What a request says besides its queries and the defaults."""
    fields = [field for field in dataclasses.fields(request) if field.name not in {"queries", "cuts", "ids"}]
    found = {field.name: getattr(request, field.name) for field in fields}
    usual = {field.name: field.default for field in fields} | Cuts()._asdict()
    told = {name: value for name, value in (found | request.cuts._asdict()).items() if value != usual[name]}
    return {"truncation_direction" if name == "side" else name: value for name, value in told.items()}


def embedded(vectors, others=None):
    """An answer of 7 tokens and 3 characters."""
    return Embedded(
        vectors, [2.0] * len(vectors), ("cpu",), 7, 3, 0.001, 0.002, 0.003, 0.0064, {} if others is None else others
    )


class FakeRouter:
    """`widths`: numbers per token for each output besides that of the model's kind. `error`: raised by `embed`.
    `model`: settings.
    """

    started, capacity, config_problem, load, space = 5.0, 4, None, 3, SPACE

    def __init__(self, kind="embedding", *, name="m", dimension=4, widths=None, error=None, model=None):
        self.settings = Settings.parse({"model": model or {"id": name}, "limits": LIMITS})
        self.card = ModelCard(
            self.settings.model.served_name, None, None, "bert", dimension, 100, 16,
            "splade" if kind == "sparse" else "mean", True, False, False, 1, 1, {"query": "q: "},
            kind=kind, labels=LABELS.get(kind, ()), token_widths=widths or {},
        )  # fmt: skip
        self.error, self.asked, self.invalid = error, [], []
        self.live_pools = {"accelerator": True, "cpu": True}

    @property
    def can_answer(self):
        return any(self.live_pools.values())

    @can_answer.setter
    def can_answer(self, answers):
        self.live_pools = dict.fromkeys(self.live_pools, answers)

    def count_invalid(self, error):
        self.invalid.append(type(error).__name__)

    async def embed(self, request):
        self.asked.append((list(request.queries), asked_of(request)))
        if self.error is not None:
            raise self.error
        kind = next((kind for kind in request.kinds if kind in self.card.kinds), None)
        if kind is None:
            raise WrongKind("as the Router says it")
        outputs = request.outputs or self.card.outputs_for(kind)
        count = len(request.queries)
        rows = {output: ANSWERS[self.card.kind if output == "text" else output][:count] for output in outputs}
        return embedded(rows.pop(outputs[0]), rows)

    @property
    def encoder(self):
        return self

    async def tokenize(self, texts, **asked):
        self.asked.append((list(texts), asked))
        return [[Token(101, "[CLS]", True, None, None), Token(7, "a", False, 0, 1)] for _ in texts]

    async def decode(self, id_lists, **asked):
        self.asked.append((list(id_lists), asked))
        return ["text" for _ in id_lists]

    async def hear_replicas(self):
        pass
