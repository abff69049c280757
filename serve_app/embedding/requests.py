"""What clients send: one type for each route. It checks a body, and it is the body's schema in `openapi.py`. Pure.

docs/clients.md has every field of the APIs that are spoken here, and what becomes of it; a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from deployments.errors import InvalidInput
from deployments.models.outputs import Output, Outputs
from deployments.models.text_pairs import NO_BOUNDS, Pair, Side, TokenBounds
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
    Unsupported,
    WholeFrom0,
    WholeFrom1,
    one_or_many,
)

_VLLM = {
    "padding": Unsupported(("do_not_pad",), "no text is padded to the model's length"),
    "priority": Unsupported((0,), "the header x-windve-priority: bulk lets others go first"),
    "mm_processor_kwargs": Unsupported(({},), "only texts are read"),
    "add_special_tokens": Unsupported((True,), "models are trained with their special tokens"),
    "messages": Unsupported(why="chats are not read here, only texts"),
    "add_generation_prompt": Unsupported((False,), "chats are not read here, only texts"),
    "continue_final_message": Unsupported((False,), "chats are not read here, only texts"),
    "chat_template": Unsupported(why="chats are not read here, only texts"),
    "chat_template_kwargs": Unsupported(({},), "chats are not read here, only texts"),
    "media_io_kwargs": Unsupported(({},), "only texts are read"),
}
_VLLM_UNUSED = {
    "user": "clients are told apart by their API keys",
    "request_id": "the header x-request-id names a request",
    "cache_salt": "no answer is kept for another request",
}

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
    def bounds(self) -> TokenBounds:
        """On tokens, where there are to be fewer than the model takes."""
        return NO_BOUNDS

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
    def query_options(self) -> AnyOptions:
        return self


class Options(AnyOptions):
    """As TEI has them."""

    truncate: bool | None = None
    """Cut inputs longer than the model takes, or refuse them. Null: as the server's settings say."""


class VllmOptions(AnyOptions):
    """As vLLM has them, beside TEI's."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1), Constraint("a whole number from 1, or -1")] | None = None
    """Cut inputs that have more tokens, special ones included. -1: as long as the model takes."""

    unsupported = _VLLM
    unused = _VLLM_UNUSED
    other_names: ClassVar = {"truncation_side": "truncation_direction"}

    @property
    def bounds(self) -> TokenBounds:
        most = self.truncate_prompt_tokens
        return NO_BOUNDS if most is None or most < 0 else TokenBounds(query=most)

    @property
    def cut(self) -> bool | None:
        return True if self.truncate_prompt_tokens is not None else super().cut


class RoleOptions(AnyOptions):
    """As Cohere and NIM have them."""

    input_type: InputType | None = None
    """What the inputs are for: the model's prompt of that name is put before them, if it has one."""

    @property
    def purpose(self) -> InputType | None:
        return self.input_type if self.prompt_name is None else None


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


class OpenAIRequest(RoleOptions, VllmOptions):
    """OpenAI's `POST /v1/embeddings`, with fields of Jina, NIM, vLLM and Infinity, and TEI's options."""

    model: Model = None
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions = None
    embedding_type: EmbeddingType | Literal["base64"] = "float"
    """Numbers of one byte, or bits; base64 is `encoding_format: base64`."""
    embed_dtype: FloatType = "float32"
    """Of floats in base64."""
    endianness: Endianness = "native"
    """Of floats in base64; native is little."""
    modality: Literal["text"] | list[Literal["text"]] | None = None
    """Nothing else is embedded."""
    normalize: bool | None = None
    """Unit vectors, or of the model's own lengths. Null: as the model's files say."""
    task: JinaTask | None = None
    """Jina's name for input_type."""

    unsupported: ClassVar = {
        "late_chunking": Unsupported((False,), "each text is embedded by itself"),
        "late_chunking_params": Unsupported(why="each text is embedded by itself"),
        "return_multivector": Unsupported((False,), "/v1/multi-vector answers a vector of each token"),
    }
    other_names: ClassVar = {"normalized": "normalize", "use_activation": "normalize"}

    @property
    def purpose(self) -> InputType | None:
        if self.task is None or self.prompt_name is not None:
            return super().purpose
        return self.input_type or _JINA_TASKS[self.task]

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

    unused: ClassVar = {"user": _VLLM_UNUSED["user"]}

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input)


class PoolingRequest(VllmOptions):
    """vLLM's `POST /pooling`; TEI's options are an extension."""

    model: Model = None
    input: Inputs
    task: Literal["token_embed"] = "token_embed"
    embedding_mode: Literal["query", "document"] = "document"
    """How to read the texts: ColBERT models read queries in a way of their own."""
    encoding_format: Literal["float"] = "float"
    dimensions: Dimensions = None

    unsupported: ClassVar = {
        "use_activation": Unsupported((True,), "the vectors of tokens are unit vectors"),
        "embed_dtype": Unsupported(("float32",), "the answer is numbers, not base64"),
        "endianness": Unsupported(("native", "little"), "the answer is numbers, not base64"),
    }

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
    def query_options(self) -> AnyOptions:
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
    def query_options(self) -> AnyOptions:
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


class CohereRerankRequest(VllmOptions):
    """`POST /rerank`, `/v1/rerank` and `/v2/rerank` with `documents`, as Cohere, Jina, vLLM and Infinity have it."""

    model: Model = None
    query: str
    documents: Annotated[list[str | Document], Constraint("a list of strings", "max_inputs")]
    top_n: WholeFrom0 | None = None
    """The best so many only; 0 is all."""
    return_documents: bool | None = None
    """Put each text beside its score. Null: on `/rerank`, as vLLM does."""
    raw_scores: bool = False
    """Logits instead of their sigmoid."""
    use_activation: bool | None = None
    """False is `raw_scores`, in vLLM's words."""
    max_tokens_per_doc: WholeFrom0 = 0
    """Cut each document behind so many tokens; 0 is none."""
    max_tokens_per_query: WholeFrom0 = 0
    """The same of the query."""

    unsupported: ClassVar = {
        "rank_fields": Unsupported((["text"],), "of a document the field text is read"),
        "max_chunks_per_doc": Unsupported(
            (1, 10), "a document is read as one text, cut to the model's length; 10 is Cohere's default"
        ),
        "relevant_spans": Unsupported((False,), "a score is of the whole document"),
        "instruction": Unsupported(why="it is a setting of the server, args.model.instruction"),
        "return_embeddings": Unsupported((False,), "a reranker has scores only"),
    }

    @property
    def bounds(self) -> TokenBounds:
        return replace(super().bounds, first=self.max_tokens_per_query or None, second=self.max_tokens_per_doc or None)

    @property
    def raw(self) -> bool:
        """Logits are asked for."""
        return self.raw_scores or self.use_activation is False

    @property
    def texts(self) -> Sequence[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    @property
    def queries(self) -> Sequence[Query]:
        return [Pair(self.query, text) for text in self.texts]


def _only_text(value: Any) -> Any:
    if value != "text":
        raise InvalidInput("only texts are embedded here, no images; send texts", param="inputs")
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
    """Inputs that have more tokens, special ones included, are too long."""

    unsupported: ClassVar = {
        "images": Unsupported(([],), "only texts are embedded"),
        "priority": _VLLM["priority"],
    }

    @property
    def bounds(self) -> TokenBounds:
        return NO_BOUNDS if self.max_tokens is None else TokenBounds(query=self.max_tokens)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise InvalidInput("send texts or inputs, one of the two", param="texts")
        return self

    @property
    def queries(self) -> Sequence[Query]:
        return self.texts or ["\n".join(part.text for part in one.content) for one in self.inputs or ()]


class ModelOptions(Fields):
    """Ollama's `options`."""

    num_ctx: int | None = None
    """Inputs that have more tokens, special ones included, are too long; 0 is as long as the model takes."""

    unused: ClassVar = {
        **dict.fromkeys(
            ("num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict"),
            "the server's settings say how the model runs",
        ),
        **dict.fromkeys(
            (
                *("num_keep", "seed", "num_predict", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n"),
                *("temperature", "repeat_penalty", "presence_penalty", "frequency_penalty", "stop"),
            ),
            "it is of text that is generated",
        ),
    }


class OllamaOptions(Options):
    """What Ollama's routes have in common."""

    model: Model = None
    options: ModelOptions = ModelOptions()

    unused: ClassVar = {"keep_alive": "the model stays loaded"}

    @property
    def bounds(self) -> TokenBounds:
        most = self.options.num_ctx
        return NO_BOUNDS if most is None or most <= 0 else TokenBounds(query=most)


class OllamaEmbedRequest(OllamaOptions):
    """Ollama's `POST /api/embed`."""

    input: str | Annotated[list[Text], Constraint("a list of strings", "max_inputs", may_be_empty=True)] = ""
    """Nothing, or an empty list, has no vectors."""
    dimensions: Dimensions = None

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input) if self.input else []


class OllamaPromptRequest(OllamaOptions):
    """Ollama's older `POST /api/embeddings`."""

    prompt: str = ""
    """Nothing has an empty vector."""

    @property
    def queries(self) -> Sequence[Query]:
        return [self.prompt] if self.prompt else []


class OllamaShowRequest(Fields):
    """Ollama's `POST /api/show`."""

    model: Model = None

    other_names: ClassVar = {"name": "model"}
    unused: ClassVar = dict.fromkeys(
        ("verbose", "system", "template", "options"), "the answer is of the model as it is served"
    )


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
