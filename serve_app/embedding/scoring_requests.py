"""Request bodies of rerankers and classifiers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Annotated, Any, ClassVar

from deployments.errors import InvalidInput
from deployments.models.text_pairs import Pair, TokenBounds
from deployments.models.tokenizer import Query
from serve_app.embedding.options import Options, VllmOptions
from serve_app.embedding.requests import OfInput
from serve_app.web.fields import (
    Constraint,
    Fields,
    Model,
    Refusal,
    TextOrPair,
    Unsupported,
    WholeFrom0,
    one_or_many,
)

Texts = str | Annotated[list[str], Constraint("a list of strings", "max_inputs")]


class RerankRequest(Options):
    """TEI's `POST /rerank`."""

    query: str
    texts: Annotated[list[str], Constraint("a list of strings", "max_inputs")]
    raw_scores: bool = False
    """Logits instead of their sigmoid."""
    return_text: bool = False
    top_n: WholeFrom0 | None = None
    """Return only this many of the best. 0: all."""

    @property
    def queries(self) -> Sequence[Query]:
        return [Pair(self.query, text) for text in self.texts]


class Document(Fields):
    """A text. Other fields beside it are ignored."""

    text: str


class ScoringOptions(VllmOptions):
    """vLLM's options for scoring pairs."""

    use_activation: bool | None = None
    """False: logits instead of their sigmoid."""
    max_tokens_per_doc: WholeFrom0 = 0
    """Truncate each document to this many tokens. 0: do not."""
    max_tokens_per_query: WholeFrom0 = 0
    """Truncate the query to this many tokens. 0: do not."""

    unsupported: ClassVar = {"instruction": Unsupported(why="it is a setting of the server, args.model.instruction")}

    @property
    def bounds(self) -> TokenBounds:
        return replace(super().bounds, first=self.max_tokens_per_query or None, second=self.max_tokens_per_doc or None)

    @property
    def raw(self) -> bool:
        """Whether logits are requested."""
        return self.use_activation is False


class CohereRerankRequest(ScoringOptions):
    """`POST /rerank`, `/v1/rerank` and `/v2/rerank` with `documents`, as in Cohere, Jina, vLLM and Infinity."""

    model: Model = None
    query: str
    documents: Annotated[list[str | Document], Constraint("a list of strings", "max_inputs")]
    top_n: WholeFrom0 | None = None
    """Return only this many of the best. 0: all."""
    return_documents: bool | None = None
    """Return each text with its score. Null: only on `/rerank` without raw_scores, as vLLM does."""
    raw_scores: bool = False
    """Infinity's name of use_activation: false. With it, `/rerank` returns texts as strings, as Infinity does."""

    unsupported: ClassVar = {
        "rank_fields": Unsupported((["text"],), "of a document, only the field text is read"),
        "max_chunks_per_doc": Unsupported(
            (1, 10), "a document is read as one text, cut to the model's length; 10 is Cohere's default"
        ),
        "relevant_spans": Unsupported((False,), "each score is for the whole document"),
        "return_embeddings": Unsupported((False,), "a reranker returns only scores"),
    }
    refused: ClassVar = {"documents": Refusal("/score gives the cosines", when="with an embedding model")}

    @property
    def raw(self) -> bool:
        return self.raw_scores or super().raw

    @property
    def texts(self) -> Sequence[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    @property
    def queries(self) -> Sequence[Query]:
        return [Pair(self.query, text) for text in self.texts]


class ScoreRequest(ScoringOptions):
    """vLLM's `POST /score`: pairs the texts of two lists by position, or one text with all of a list."""

    model: Model = None
    text_1: Texts
    text_2: Texts

    other_names: ClassVar = {
        **dict.fromkeys(("queries", "data_1"), "text_1"),
        **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
    }

    @property
    def sides(self) -> tuple[Sequence[str], Sequence[str]]:
        """The texts of both lists. Raises InvalidInput unless the first has one text, or as many as the second."""
        first, second = one_or_many(self.text_1), one_or_many(self.text_2)
        if len(first) not in {1, len(second)}:
            counts = f"text_1 has {len(first)} texts and text_2 has {len(second)}"
            raise InvalidInput(f"{counts}; send one in text_1, or as many as in text_2", param="text_1")
        return first, second

    @property
    def queries(self) -> Sequence[Query]:
        """Raises InvalidInput."""
        first, second = self.sides
        return [Pair(*pair) for pair in zip(cycle(first), second, strict=False)]

    def texts(self, most: int) -> Sequence[Query]:
        """The texts of both sides, for a model that embeds each. Raises InvalidInput if there are more than `most`."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if getattr(self, name):
                raise InvalidInput(f"{name} works only with rerankers; send truncate_prompt_tokens instead", param=name)
        first, second = self.sides
        if (count := len(first) + len(second)) > most:
            problem = f"text_1 and text_2 have {count} texts and this server accepts {most} per request"
            raise InvalidInput(f"{problem}; send fewer at once", param="text_2")
        return [*first, *second]


class ClassifyRequest(OfInput, VllmOptions):
    """vLLM's `POST /classify`."""

    use_activation: bool | None = None
    """False: logits instead of their sigmoid (one label) or softmax (several)."""


class PredictRequest(Options):
    """TEI's `POST /predict`."""

    inputs: TextOrPair | Annotated[list[TextOrPair], Constraint("a list of such lists", "max_inputs", not_first=(str,))]
    """A text, a list of one text or a pair, or a list of such lists."""
    raw_scores: bool = False
    """Logits instead of their sigmoid (one label) or softmax (several)."""

    @property
    def single(self) -> bool:
        """Whether one text or pair was sent, not a batch."""
        return isinstance(self.inputs, str) or isinstance(self.inputs[0], str)

    @property
    def queries(self) -> Sequence[Query]:
        batch: Any = [self.inputs] if self.single else self.inputs
        return [one if isinstance(one, str) else Pair(*one) if len(one) == 2 else one[0] for one in batch]
