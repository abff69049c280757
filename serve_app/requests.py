"""What clients send: one type for each route. It checks a body, and it is the body's schema in `openapi.py`. Pure.

A bad body is refused with one plain sentence. Fields that a route does not know, and fields that are null, are ignored,
as clients of all kinds need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from deployments import trial
from deployments.errors import EmptyInput, InvalidInput
from deployments.models.outputs import Output, Outputs
from deployments.models.pairs import Pair
from deployments.models.tokenizer import Query, Side
from deployments.trial import Trial
from serve_app.several_models import unknown_model

PRIORITY, TIMEOUT = "x-windve-priority", "x-request-timeout-ms"
_PRIORITY, _TIMEOUT, _TRIAL = PRIORITY.encode(), TIMEOUT.encode(), trial.HEADER.encode()
_TIMEOUT_DIGITS = 9  # eleven days
_SHORT = 20  # characters
_WRONG_TYPE, _WRONG = "windve_type", "windve_value"  # as pydantic wants names for its kinds of errors
_TYPES = {"string_type": "a string", "bool_type": "true or false"}  # pydantic's names
_EMPTY = {
    "string_too_short": "is an empty string; send text or leave it out",
    "too_short": "is an empty list; send at least one item",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What this server accepts: its model's name, the size of its vectors, and the bounds on one request.

    `aliases`: what else the model may be called. `any_name`: it may be called anything.
    """

    model: str
    dimension: int
    max_inputs: int
    aliases: tuple[str, ...] = ()
    any_name: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All that the model goes by, its own name first."""
        return tuple(dict.fromkeys((self.model, *self.aliases)))

    def check_model(self, name: str) -> None:
        """Raises UnknownModel."""
        if name != self.model and name not in self.aliases and not self.any_name:
            raise unknown_model(name, self.names)

    @property
    def max_sentences(self) -> int:
        """Of `/similarity`, beside the source sentence."""
        return self.max_inputs - 1


@dataclass(frozen=True, slots=True)
class _Is:
    """What a value must be, in words, for the sentence that refuses another.

    `most`: the rule that bounds a list's length; such a list must not be empty either. `not_first`: the list is one of
    another kind if its first item has one of these types.
    """

    words: str
    most: str | None = None
    not_first: tuple[type, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        if schema["type"] != "list":
            return core_schema.custom_error_schema(schema, _WRONG_TYPE, custom_error_message=self.words)
        schema["fail_fast"] = True  # there may be millions of bad items
        if self.most:
            schema["min_length"] = 1
        return core_schema.with_info_before_validator_function(self._check_list, schema)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | ({"maxItems": self.most} if self.most else {})

    def _check_list(self, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list) or (self.not_first and value and type(value[0]) in self.not_first):
            raise PydanticCustomError(_WRONG_TYPE, self.words)
        most = getattr(info.context, self.most) if self.most else len(value)
        if len(value) > most:
            problem = f"has {len(value)} items and this server takes {most} in one request; send fewer at once"
            raise PydanticCustomError(_WRONG, problem)
        return value


def _known_model(name: str, info: ValidationInfo) -> str:
    rules: Any = info.context
    rules.check_model(name)
    return name


def check_dimensions(value: Any, largest: int) -> int | None:
    """How many numbers of a vector are asked for, if fewer than all. Raises InvalidInput."""
    if value is not None and (type(value) is not int or not 1 <= value <= largest):
        raise InvalidInput(
            f"dimensions must be a whole number from 1 to {largest} (this model's own), not {_shown(value)}",
            param="dimensions",
        )
    return value


def _dimensions(value: Any, info: ValidationInfo) -> int | None:
    rules: Any = info.context
    return check_dimensions(value, rules.dimension)


def _one_or_two(texts: Any) -> Any:
    if not isinstance(texts, list):
        raise PydanticCustomError(_WRONG_TYPE, "a list of one or two strings")
    if texts == [""]:
        raise PydanticCustomError("string_too_short", "")
    if len(texts) not in {1, 2}:
        problem = f"is a list of {len(texts)} strings, and a pair has 2; send a batch as a list of lists"
        raise PydanticCustomError(_WRONG, problem)
    return texts


# Where a schema has the name of a value as its bound, `openapi.py` puts the server's own value.
Text = Annotated[str, Field(min_length=1)]
TextOrPair = Text | Annotated[list[str], Field(min_length=1, max_length=2), BeforeValidator(_one_or_two)]
TokenId = Annotated[
    int,
    Field(ge=0, le=2**31 - 1, json_schema_extra={"maximum": "largest_id"}),
    _Is("a token id (a whole number from 0)"),
]
TokenIds = Annotated[
    list[TokenId],
    Field(min_length=1, description="Token ids of this model, special tokens included."),
    _Is("a list of token ids"),
]
MaybeNoIds = Annotated[list[TokenId], _Is("a list of token ids")]
TextsOrIds = Annotated[list[Text | TokenIds], _Is("a list of strings", "max_inputs", not_first=(int, float))]
Dimensions = Annotated[int, Field(ge=1, json_schema_extra={"maximum": "dimension"}), BeforeValidator(_dimensions)]
Model = Annotated[Annotated[str, AfterValidator(_known_model)] | None, Field(json_schema_extra={"enum": "models"})]
Prompt = Annotated[str | None, Field(json_schema_extra={"enum": "prompts"})]


class _Fields(BaseModel):
    """Some of a request's fields. The docstring under a field is its description in the OpenAPI document."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)
    _required: ClassVar[dict[str, None]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._required = {name: None for name, field in cls.model_fields.items() if field.is_required()}

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, fields: Any) -> Any:
        """Where a required field is absent, it is null instead, and its type says what it must be."""
        if not isinstance(fields, dict):
            names = " and ".join(cls._required)
            raise PydanticCustomError(_WRONG_TYPE, f"an object with {names}" if names else "an object")
        return cls._required | {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def parse(cls, body: Any, rules: Rules) -> Self:
        """`body`: its bytes, or the content of its JSON. Raises InvalidInput, EmptyInput or UnknownModel."""
        if body == b"":
            raise InvalidInput("the body is empty; send a JSON object")
        try:
            return cls.model_validate(orjson.loads(body) if isinstance(body, bytes) else body, context=rules)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"the body is not valid JSON: {error}") from None
        except ValidationError as invalid:
            raise _problem(invalid.errors(include_url=False)) from None


class Options(_Fields):
    """How queries become token ids: what all routes to the model have in common."""

    truncate: bool | None = None
    """Cut inputs longer than the model takes, or refuse them. Null: as the server's settings say."""
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    """The side on which a too long input is cut."""
    prompt_name: Prompt = None
    """Which of the model's prompts is put before each input. Null: the default, if there is one."""

    @property
    def side(self) -> Side:
        return "left" if self.truncation_direction in {"left", "Left"} else "right"


class OpenAIRequest(Options):
    """OpenAI's `POST /v1/embeddings`; the fields of Options are an extension."""

    model: Model = None
    input: Text | TextsOrIds | TokenIds
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions | None = None
    """Keep the first so many numbers (Matryoshka models)."""
    user: Any = None
    """Ignored."""

    @property
    def queries(self) -> Sequence[Query]:
        return _one_or_many(self.input)


class EncodeRequest(Options):
    """TEI's `POST /embed_all` and `POST /embed_sparse`."""

    inputs: Text | TextsOrIds | TokenIds
    """A text, a list of texts, a list of token ids, or a list of such lists."""

    @property
    def queries(self) -> Sequence[Query]:
        return _one_or_many(self.inputs)


class EmbedRequest(EncodeRequest):
    """TEI's `POST /embed`."""

    normalize: bool = True
    dimensions: Dimensions | None = None
    """Keep the first so many numbers (Matryoshka models)."""


class MultiVectorRequest(Options):
    """Jina's `POST /v1/multi-vector`; the fields of Options are an extension."""

    model: Model = None
    input: Text | TextsOrIds | TokenIds
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    dimensions: Dimensions | None = None
    """Keep the first so many numbers (Matryoshka models)."""
    embedding_type: Literal["float"] = "float"
    input_type: Literal["query", "document"] = "document"
    """How to read the texts: ColBERT models read queries in a way of their own."""

    @property
    def queries(self) -> Sequence[Query]:
        return _one_or_many(self.input)


class PoolingRequest(Options):
    """vLLM's `POST /pooling`; the fields of Options are an extension."""

    model: Model = None
    input: Text | TextsOrIds | TokenIds
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    task: Literal["token_embed"] = "token_embed"
    embedding_mode: Literal["query", "document"] = "document"
    """How to read the texts: ColBERT models read queries in a way of their own."""
    encoding_format: Literal["float"] = "float"
    dimensions: Dimensions | None = None
    """Keep the first so many numbers (Matryoshka models)."""
    user: Any = None
    """Ignored."""

    @property
    def queries(self) -> Sequence[Query]:
        return _one_or_many(self.input)


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


class Sentences(_Fields):
    """What TEI's `POST /similarity` compares."""

    source_sentence: Text
    sentences: Annotated[list[Text], _Is("a list of strings", "max_sentences")]


class SimilarityRequest(_Fields):
    """TEI's `POST /similarity`. The source sentence is the first query."""

    inputs: Sentences
    parameters: Options = Options()

    @property
    def queries(self) -> Sequence[Query]:
        return [self.inputs.source_sentence, *self.inputs.sentences]


class RerankRequest(Options):
    """TEI's `POST /rerank`."""

    query: str
    texts: Annotated[list[str], _Is("a list of strings", "max_inputs")]
    raw_scores: bool = False
    """Logits instead of their sigmoid."""
    return_text: bool = False

    @property
    def queries(self) -> Sequence[Query]:
        return [Pair(self.query, text) for text in self.texts]


class Document(_Fields):
    """A text with other fields beside it, which are ignored."""

    text: str


class CohereRequest(Options):
    """Cohere's `POST /v1/rerank` and `POST /v2/rerank`; the fields of Options are an extension."""

    model: Model = None
    query: str
    documents: Annotated[list[str | Document], _Is("a list of strings", "max_inputs")]
    top_n: Annotated[int, Field(ge=1), _Is("a whole number from 1")] | None = None
    """The best so many only."""
    return_documents: bool = False

    @property
    def texts(self) -> Sequence[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    @property
    def queries(self) -> Sequence[Query]:
        return [Pair(self.query, text) for text in self.texts]


class PredictRequest(Options):
    """TEI's `POST /predict`."""

    inputs: TextOrPair | Annotated[list[TextOrPair], _Is("a list of such lists", "max_inputs", not_first=(str,))]
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


class TokenizeRequest(_Fields):
    """TEI's `POST /tokenize`."""

    inputs: Text | Annotated[list[Text], _Is("a list of strings", "max_inputs")]
    add_special_tokens: bool = True
    prompt_name: Prompt = None
    """Which of the model's prompts is put before each input. Null: the default, if there is one."""

    @property
    def texts(self) -> Sequence[str]:
        return _one_or_many(self.inputs)


class DecodeRequest(_Fields):
    """TEI's `POST /decode`."""

    ids: TokenIds | Annotated[list[MaybeNoIds], _Is("a list of such lists", "max_inputs", not_first=(int, float))]
    skip_special_tokens: bool = True

    @property
    def id_lists(self) -> Sequence[Sequence[int]]:
        return _one_or_many(self.ids)


def admission(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """What a request's headers ask of `Router.embed` beyond what is usual: to be admitted as bulk, or by the depths of
    a trial, and how long to wait. Raises InvalidInput.
    """
    asked: dict[str, Any] = {}
    priority, own, timeout = headers.get(_PRIORITY), headers.get(_TRIAL), headers.get(_TIMEOUT)
    if priority is not None:
        if priority not in {b"bulk", b"normal"}:
            raise InvalidInput(f"the header {PRIORITY} may be 'bulk' or 'normal', not '{priority.decode('latin-1')}'")
        asked["bulk"] = priority == b"bulk"
    if own is not None:
        asked["trial"] = Trial.parse(own.decode("latin-1"))
    if timeout is not None:
        if not (timeout.isdigit() and len(timeout) <= _TIMEOUT_DIGITS and int(timeout)):
            given = timeout.decode("latin-1")
            raise InvalidInput(f"the header {TIMEOUT} should be whole milliseconds from 1, not '{given}'")
        asked["timeout_s"] = int(timeout) / 1000
    return asked


# Fields within fields. Between them pydantic names the branches of unions.
_NESTED = {*Options.model_fields, *Sentences.model_fields, *Document.model_fields}


def _one_or_many(sent: Any) -> Sequence[Any]:
    """A text is one query, and so is a list of token ids."""
    return [sent] if isinstance(sent, str) or isinstance(sent[0], int) else sent


def _problem(errors: Sequence[ErrorDetails]) -> InvalidInput:
    """The most telling error as one sentence.

    A value that may be of several types has errors for each. One of a value with the right type tells more than one of
    the wrong type, and one that was found farther in tells more than one before. The sentence names all the types.
    """
    found = [(_path(error["loc"]), error["type"], error) for error in errors]
    path, kind, error = max(found, key=lambda one: (one[1] in _EMPTY, one[1] == _WRONG, one[0]))
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    param = str(path[0]) if path else None
    if kind in _EMPTY:
        return EmptyInput(f"{where} {_EMPTY[kind]}", param=param)
    if kind == _WRONG:
        return InvalidInput(f"{where} {error['msg']}", param=param)
    *others, last = dict.fromkeys(
        _TYPES.get(kind, error["msg"].removeprefix("Input should be ")) for at, kind, error in found if at == path
    )
    words = f"{', '.join(others)} or {last}" if others else last
    if error["input"] is None and path and isinstance(path[-1], str):
        return InvalidInput(f"{where} is missing; send {words}", param=param)
    return InvalidInput(f"{where or 'the body'} must be {words}, not {_shown(error['input'])}", param=param)


def _path(found: Sequence[str | int]) -> tuple[str | int, ...]:
    return tuple(part for at, part in enumerate(found) if not at or isinstance(part, int) or part in _NESTED)


def _shown(value: Any) -> str:
    """A number or a short string as it is, of other JSON values the type in JSON's own words."""
    if isinstance(value, str) and len(value) <= _SHORT:
        return repr(value)
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value)) or str(value)
