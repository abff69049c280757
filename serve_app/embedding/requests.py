"""What clients send: one type for each route. It checks a body, and it is the body's schema in `openapi.py`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from deployments.errors import InvalidInput
from deployments.models.outputs import Output, Outputs
from deployments.models.text_pairs import Pair, Side
from deployments.models.tokenizer import Query
from serve_app.embedding.input_types import InputType
from serve_app.embedding.vector_types import EmbeddingType, Endianness, FloatType
from serve_app.web.fields import (
    Constraint,
    Dimensions,
    Fields,
    Inputs,
    Model,
    Prompt,
    Text,
    TextOrPair,
    TextsOrIds,
    TokenIds,
    WholeFrom1,
    one_or_many,
)

CohereType = EmbeddingType | Literal["base64"]


class AnyOptions(Fields):
    """How queries become token ids: what all routes to the model have in common."""

    truncate: bool | Literal["NONE", "START", "END"] | None = None
    """Cut inputs longer than the model takes, on which side, or refuse them. Null: as the server's settings say."""
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    """The side on which a too long input is cut."""
    prompt_name: Prompt = None
    """Which of the model's prompts is put before each input; empty: none. Null: the default, if there is one."""

    @property
    def cut(self) -> bool | None:
        """Whether too long inputs are cut."""
        return self.truncate != "NONE" if isinstance(self.truncate, str) else self.truncate

    @property
    def side(self) -> Side:
        if isinstance(self.truncate, str):
            return "left" if self.truncate == "START" else "right"
        return "left" if self.truncation_direction in {"left", "Left"} else "right"

    @property
    def purpose(self) -> InputType | None:
        """What the inputs are for, where the client says it and names no prompt."""
        return None

    @property
    def options(self) -> AnyOptions:
        return self


class Options(AnyOptions):
    """As TEI has them."""

    truncate: bool | None = None
    """Cut inputs longer than the model takes, or refuse them. Null: as the server's settings say."""


class RoleOptions(AnyOptions):
    """As Cohere and NIM have them."""

    input_type: InputType | None = None
    """What the inputs are for: the model's prompt of that name is put before them, if it has one."""

    @property
    def purpose(self) -> InputType | None:
        return self.input_type if self.prompt_name is None else None


class OpenAIRequest(RoleOptions):
    """OpenAI's `POST /v1/embeddings`, with fields of NIM, of vLLM, and TEI's options."""

    model: Model = None
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions = None
    embedding_type: EmbeddingType = "float"
    """Numbers of one byte, or bits."""
    embed_dtype: FloatType = "float32"
    """Of floats in base64."""
    endianness: Endianness = "native"
    """Of floats in base64; native is little."""
    modality: Literal["text"] | list[Literal["text"]] | None = None
    """Nothing else is embedded."""
    user: Any = None
    """Ignored."""

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input)


class EncodeRequest(Options):
    """TEI's `POST /embed_all` and `POST /embed_sparse`."""

    inputs: Inputs

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.inputs)


class EmbedRequest(EncodeRequest):
    """TEI's `POST /embed`."""

    normalize: bool = True
    dimensions: Dimensions = None


class MultiVectorRequest(Options):
    """Jina's `POST /v1/multi-vector`; the fields of Options are an extension."""

    model: Model = None
    input: Inputs
    dimensions: Dimensions = None
    embedding_type: Literal["float"] = "float"
    input_type: Literal["query", "document"] = "document"
    """How to read the texts: ColBERT models read queries in a way of their own."""

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input)


class PoolingRequest(Options):
    """vLLM's `POST /pooling`; the fields of Options are an extension."""

    model: Model = None
    input: Inputs
    task: Literal["token_embed"] = "token_embed"
    embedding_mode: Literal["query", "document"] = "document"
    """How to read the texts: ColBERT models read queries in a way of their own."""
    encoding_format: Literal["float"] = "float"
    dimensions: Dimensions = None
    user: Any = None
    """Ignored."""

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input)


class SeveralRequest(EncodeRequest):
    """`POST /encode`: what FlagEmbedding's `BGEM3FlagModel.encode` takes."""

    return_dense: bool = True
    """A unit vector of each text."""
    return_sparse: bool = False
    """The weights of each text's token ids."""
    return_colbert_vecs: bool = False
    """A unit vector of each token but the first."""

    @property
    def outputs(self) -> Outputs:
        """Raises InvalidInput where nothing is asked for."""
        wanted: dict[Output, bool] = {
            "text": self.return_dense,
            "sparse": self.return_sparse,
            "multi_vector": self.return_colbert_vecs,
        }
        if not any(wanted.values()):
            raise InvalidInput("return_dense, return_sparse or return_colbert_vecs must be true", param="return_dense")
        return tuple(output for output, is_wanted in wanted.items() if is_wanted)


class Sentences(Fields):
    """What TEI's `POST /similarity` compares. The source sentence is the first query."""

    source_sentence: Text
    sentences: Annotated[list[Text], Constraint("a list of strings", "max_sentences")]

    @property
    def queries(self) -> Sequence[Query]:
        return [self.source_sentence, *self.sentences]


class SimilarityRequest(Fields):
    """TEI's `POST /similarity`."""

    inputs: Sentences
    parameters: Options = Options()

    @property
    def queries(self) -> Sequence[Query]:
        return self.inputs.queries

    @property
    def options(self) -> AnyOptions:
        return self.parameters


class RootRequest(Options):
    """`POST /` of an embedding model: TEI's `/embed`, or Hugging Face's body of sentence similarity."""

    inputs: Text | TextsOrIds | TokenIds | Sentences
    """A text, a list of texts, a list of token ids, a list of such lists, or sentences to compare."""
    normalize: bool = True
    dimensions: Dimensions = None
    parameters: Options = Options()
    """Beside sentences to compare."""

    @property
    def queries(self) -> Sequence[Query]:
        return self.inputs.queries if isinstance(self.inputs, Sentences) else one_or_many(self.inputs)

    @property
    def options(self) -> AnyOptions:
        return self.parameters if isinstance(self.inputs, Sentences) else self


class RerankRequest(Options):
    """TEI's `POST /rerank`."""

    query: str
    texts: Annotated[list[str], Constraint("a list of strings", "max_inputs")]
    raw_scores: bool = False
    """Logits instead of their sigmoid."""
    return_text: bool = False

    @property
    def queries(self) -> Sequence[Query]:
        return [Pair(self.query, text) for text in self.texts]


class Document(Fields):
    """A text with other fields beside it, which are ignored."""

    text: str


class CohereRerankRequest(Options):
    """Cohere's `POST /v1/rerank` and `POST /v2/rerank`; the fields of Options are an extension."""

    model: Model = None
    query: str
    documents: Annotated[list[str | Document], Constraint("a list of strings", "max_inputs")]
    top_n: WholeFrom1 | None = None
    """The best so many only."""
    return_documents: bool = False

    @property
    def texts(self) -> Sequence[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    @property
    def queries(self) -> Sequence[Query]:
        return [Pair(self.query, text) for text in self.texts]


_NO_IMAGES = "only texts are embedded here, no images; send texts"


def _only_text(value: Any) -> Any:
    if value != "text":
        raise InvalidInput(_NO_IMAGES, param="inputs")
    return value


def _no_images(_: Any) -> Any:
    raise InvalidInput(_NO_IMAGES, param="images")


def _no_max_tokens(_: Any) -> Any:
    raise InvalidInput("max_tokens is not known here: the model's own length counts; leave it out", param="max_tokens")


class Content(Fields):
    """A part of an input."""

    type: Annotated[Literal["text"], BeforeValidator(_only_text)] = "text"
    text: Text


class CohereInput(Fields):
    """An input in parts. They are joined by line breaks."""

    content: Annotated[list[Content], Field(min_length=1), Constraint("a list of objects with type and text")]


class CohereEmbedRequest(RoleOptions):
    """Cohere's `POST /v1/embed` and `POST /v2/embed`, with TEI's options. It needs `texts` or `inputs`."""

    model: Model = None
    texts: Annotated[list[Text], Constraint("a list of strings", "max_inputs")] | None = None
    inputs: Annotated[list[CohereInput], Constraint("a list of objects with content", "max_inputs")] | None = None
    images: Annotated[None, BeforeValidator(_no_images)] = None
    """Refused: only texts are embedded."""
    embedding_types: Annotated[list[CohereType], Constraint("a list of types")] | None = None
    """Null: floats."""
    output_dimension: Dimensions = None
    max_tokens: Annotated[None, BeforeValidator(_no_max_tokens)] = None
    """Refused: the model's own length counts."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise InvalidInput("send texts or inputs, one of the two", param="texts")
        return self

    @property
    def queries(self) -> Sequence[Query]:
        return self.texts or ["\n".join(part.text for part in one.content) for one in self.inputs or ()]


class OllamaEmbedRequest(Options):
    """Ollama's `POST /api/embed`."""

    model: Model = None
    input: Text | Annotated[list[Text], Constraint("a list of strings", "max_inputs")]
    dimensions: Dimensions = None

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input)


class OllamaPromptRequest(Options):
    """Ollama's older `POST /api/embeddings`."""

    model: Model = None
    prompt: Text

    @property
    def queries(self) -> Sequence[Query]:
        return [self.prompt]


class PredictRequest(Options):
    """TEI's `POST /predict`."""

    inputs: TextOrPair | Annotated[list[TextOrPair], Constraint("a list of such lists", "max_inputs", not_first=(str,))]
    """A text, a list of one text or a pair, or a list of such lists."""
    raw_scores: bool = False
    """Logits instead of their sigmoid (one label) or softmax (several)."""

    @property
    def single(self) -> bool:
        """One text or pair was sent, not a batch."""
        return isinstance(self.inputs, str) or isinstance(self.inputs[0], str)

    @property
    def queries(self) -> Sequence[Query]:
        batch: Any = [self.inputs] if self.single else self.inputs
        return [one if isinstance(one, str) else Pair(*one) if len(one) == 2 else one[0] for one in batch]
