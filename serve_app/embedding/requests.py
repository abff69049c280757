"""Request bodies of the embedding routes, one type per route: it validates the body and yields its schema. Pure.

`scoring_requests.py` has those of rerankers and classifiers, `ollama.py` Ollama's.
docs/clients.md lists every field of these APIs and how it is handled; a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from deployments.errors import InvalidInput
from deployments.models.colbert import Role
from deployments.models.outputs import Output, Outputs
from deployments.models.text_pairs import NO_BOUNDS, TokenBounds
from deployments.models.tokenizer import Query
from serve_app.embedding.options import PRIORITY, USER, AnyOptions, InputType, Options, RoleOptions, VllmOptions
from serve_app.embedding.output_shapes import EmbeddingType, Endianness, FloatType
from serve_app.web.fields import (
    Constraint,
    Dimensions,
    DimensionsOrAll,
    Fields,
    Inputs,
    Model,
    Refusal,
    Text,
    TextsOrIds,
    TokenIds,
    Unsupported,
    WholeFrom1,
    one_or_many,
)

_NUMBERS = "the answer is numbers, not base64"

CohereType = EmbeddingType | Literal["base64"]

_JINA_TASKS: dict[str, InputType | None] = {
    "retrieval.query": "query",
    "retrieval.passage": "passage",
    "code.query": "query",
    "code.passage": "passage",
    "text-matching": None,
    "classification": "classification",
    "clustering": "clustering",
    "separation": "clustering",
}
JinaTask = Literal[
    "retrieval.query", "retrieval.passage", "code.query", "code.passage", "text-matching", "classification",
    "clustering", "separation",
]  # fmt: skip


class OfInput(AnyOptions):
    """The fields that OpenAI's routes and those like them share."""

    model: Model = None
    input: Inputs

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input)


class OpenAIRequest(OfInput, RoleOptions, VllmOptions):
    """OpenAI's `POST /v1/embeddings`, with fields of Jina, NIM, vLLM and Infinity, and TEI's options."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions = None
    embedding_type: EmbeddingType | Literal["base64"] = "float"
    """int8 and uint8: one byte per number. binary and ubinary: one bit. base64: the same as encoding_format: base64."""
    embed_dtype: FloatType = "float32"
    """The number format of floats in base64."""
    endianness: Endianness = "native"
    """The byte order of floats in base64. native: little."""
    modality: Literal["text"] | list[Literal["text"]] | None = None
    """Only text can be embedded."""
    normalize: bool | None = None
    """true: unit vectors. false: the model's own lengths. Null: as the model's files say."""
    task: JinaTask | None = None
    """Jina's name for input_type."""

    unsupported: ClassVar = {
        "late_chunking": Unsupported((False,), "each text is embedded by itself"),
        "late_chunking_params": Unsupported(why="each text is embedded by itself"),
        "return_multivector": Unsupported((False,), "/v1/multi-vector gives a vector of each token"),
    }
    refused: ClassVar = {
        "encoding_format": Refusal("base64 has the same numbers", ("bytes", "bytes_only")),
        "embed_dtype": Refusal("float16 and bfloat16 are the narrowest", ("fp8_e4m3", "fp8_e5m2")),
        "modality": Refusal("only text can be embedded", ("image", "audio")),
    }
    other_names: ClassVar = {
        "normalized": "normalize",
        "use_activation": "normalize",
        "output_dimension": "dimensions",
        "output_dtype": "embedding_type",
    }

    @property
    def purpose(self) -> InputType | None:
        if self.task is None or self.prompt_name is not None:
            return super().purpose
        return self.input_type or _JINA_TASKS[self.task]


class InfinityRequest(OpenAIRequest):
    """Infinity's `POST /embeddings`: OpenAI's, but its clients mean all by the dimensions 0."""

    dimensions: DimensionsOrAll = None


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


class MultiVectorRequest(OfInput, Options):
    """Jina's `POST /v1/multi-vector`; the fields of Options are an extension."""

    dimensions: Dimensions = None
    embedding_type: Literal["float"] = "float"
    input_type: Literal["query", "document"] = "document"
    """How to encode the texts: ColBERT models encode queries and documents differently."""

    unused: ClassVar = {"user": USER}
    refused: ClassVar = {"embedding_type": Refusal(_NUMBERS, ("base64", "binary", "ubinary"))}

    @property
    def role(self) -> Role:
        return self.input_type


class PoolingRequest(OfInput, VllmOptions):
    """vLLM's `POST /pooling`; TEI's options are an extension."""

    task: Literal["token_embed"] = "token_embed"
    embedding_mode: Literal["query", "document"] = "document"
    """How to encode the texts: ColBERT models encode queries and documents differently."""
    encoding_format: Literal["float"] = "float"
    dimensions: Dimensions = None

    unsupported: ClassVar = {
        "use_activation": Unsupported((True,), "the vectors of tokens are unit vectors"),
        "embed_dtype": Unsupported(("float32",), _NUMBERS),
        "endianness": Unsupported(("native", "little"), _NUMBERS),
    }
    refused: ClassVar = {
        "encoding_format": Refusal(_NUMBERS, ("base64", "bytes", "bytes_only")),
        "task": Refusal("/v1/embeddings and /classify have it", ("embed", "classify", "token_classify")),
    }

    @property
    def role(self) -> Role:
        return self.embedding_mode


class SeveralRequest(EncodeRequest):
    """`POST /encode`, with the parameters of FlagEmbedding's `BGEM3FlagModel.encode`."""

    return_dense: bool = True
    """Return a unit vector for each text."""
    return_sparse: bool = False
    """Return the weights of each text's token ids."""
    return_colbert_vecs: bool = False
    """Return a unit vector for each token except the first."""

    @property
    def outputs(self) -> Outputs:
        """Raises InvalidInput if no output is requested."""
        wanted: dict[Output, bool] = {
            "text": self.return_dense,
            "sparse": self.return_sparse,
            "multi_vector": self.return_colbert_vecs,
        }
        if not any(wanted.values()):
            raise InvalidInput("return_dense, return_sparse or return_colbert_vecs must be true", param="return_dense")
        return tuple(output for output, is_wanted in wanted.items() if is_wanted)


class Sentences(Fields):
    """The sentences that TEI's `POST /similarity` compares. The source sentence is the first query."""

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
    def query_options(self) -> AnyOptions:
        return self.parameters


class RootRequest(Options):
    """`POST /` of an embedding model: the body of TEI's `/embed`, or Hugging Face's body for sentence similarity."""

    inputs: Text | TextsOrIds | TokenIds | Sentences
    """A text, a list of texts, a list of token ids, a list of such lists, or sentences to compare."""
    normalize: bool = True
    dimensions: Dimensions = None
    parameters: Options = Options()
    """Used only with sentences to compare."""

    @property
    def queries(self) -> Sequence[Query]:
        return self.inputs.queries if isinstance(self.inputs, Sentences) else one_or_many(self.inputs)

    @property
    def query_options(self) -> AnyOptions:
        return self.parameters if isinstance(self.inputs, Sentences) else self


def _only_text(value: Any) -> Any:
    if value != "text":
        raise InvalidInput("only text can be embedded here, not images; send texts", param="inputs")
    return value


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
    embedding_types: Annotated[list[CohereType], Constraint("a list of types")] | None = None
    """Null: floats."""
    output_dimension: Dimensions = None
    max_tokens: WholeFrom1 | None = None
    """Maximum tokens per input, special tokens included; `truncate` decides on longer ones."""

    unsupported: ClassVar = {"images": Unsupported(([],), "only texts are embedded"), "priority": PRIORITY}

    @property
    def bounds(self) -> TokenBounds:
        return NO_BOUNDS if self.max_tokens is None else TokenBounds(query=self.max_tokens)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise InvalidInput("send either texts or inputs, not both", param="texts")
        return self

    @property
    def queries(self) -> Sequence[Query]:
        return self.texts or ["\n".join(part.text for part in one.content) for one in self.inputs or ()]
