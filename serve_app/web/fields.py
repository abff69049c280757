"""The base of typed request bodies. Turns what is wrong with a body into one plain sentence. Pure.

`requests.py` has the types. Unknown fields and null fields are ignored, so that all kinds of clients work. A field that
the route's API has but this server does not support is in `Fields.unsupported` or `Fields.unused`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Self

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

from deployments.errors import EmptyInput, InvalidInput
from serve_app.config.models import LATEST, unknown_model

_SHORT = 20  # characters
_WRONG_TYPE, _WRONG = "windve_type", "windve_value"  # pydantic requires a name for each kind of error
_TYPES = {"string_type": "a string", "bool_type": "true or false"}  # pydantic's names
_TOO_LONG = "string_too_long"
_EMPTY = {
    "string_too_short": "is an empty string; send text",
    "too_short": "is an empty list; send at least one item",
}
_NAMES: set[str] = set()  # of all fields; other names in pydantic's paths are the branches of unions


@dataclass(frozen=True, slots=True)
class Rules:
    """What this server accepts: its model's name, the size of its vectors, and the bounds on one request.

    `aliases`: further names of the model. `any_name`: any name is accepted.
    """

    model: str
    dimension: int
    max_inputs: int
    aliases: tuple[str, ...] = ()
    any_name: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, its own first."""
        return tuple(dict.fromkeys((self.model, *self.aliases)))

    def check_model(self, name: str) -> None:
        """Raises UnknownModel. `NAME:latest`, which Ollama's clients send, counts as NAME."""
        if name == self.model or self.any_name or name in self.aliases or name.removesuffix(LATEST) in self.names:
            return
        raise unknown_model(name, self.names)

    @property
    def max_sentences(self) -> int:
        """The most sentences in `/similarity`, besides the source sentence."""
        return self.max_inputs - 1


@dataclass(frozen=True, slots=True)
class Constraint:
    """Describes in words what a value must be, for the error text.

    `most`: the field of `Rules` that bounds a list's length. Such a list must not be empty, unless `may_be_empty`.
    `not_first`: a list whose first item has one of these types is of another kind.
    """

    words: str
    most: str | None = None
    not_first: tuple[type, ...] = ()
    may_be_empty: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        if schema["type"] != "list":
            return core_schema.custom_error_schema(schema, _WRONG_TYPE, custom_error_message=self.words)
        schema["fail_fast"] = True  # because there may be millions of bad items
        if self.most and not self.may_be_empty:
            schema["min_length"] = 1
        return core_schema.with_info_before_validator_function(self._check_list, schema)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | ({"maxItems": self.most} if self.most else {})

    def _check_list(self, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list) or (self.not_first and value and type(value[0]) in self.not_first):
            raise PydanticCustomError(_WRONG_TYPE, self.words)
        most = getattr(info.context, self.most) if self.most else len(value)
        if len(value) > most:
            problem = f"has {len(value)} items and this server accepts {most} per request; send fewer at once"
            raise PydanticCustomError(_WRONG, problem)
        return value


def _known_model(name: str, info: ValidationInfo) -> str:
    rules: Any = info.context
    rules.check_model(name)
    return name


class Unsupported(NamedTuple):
    """A field that the route's API has but this server does not support.

    `same`: values that ask for what the server does anyway. All others are refused. `why`: the reason, for the error.
    """

    same: tuple[Any, ...] = ()
    why: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidInput."""
        if value not in self.same:
            why = f": {self.why}" if self.why else ""
            raise InvalidInput(f"{name} is not supported here{why}; leave it out", param=name)


class Refusal(NamedTuple):
    """What is refused of a field that this server supports otherwise. `why`: the reason, for the error.

    `values`: these values. `when`: otherwise, when it is refused, in words; the type itself checks that.
    """

    why: str
    values: tuple[Any, ...] = ()
    when: str = ""

    def error(self, name: str, value: Any = None) -> InvalidInput:
        """The error for the field `name`."""
        what = self.when or _shown(value)
        return InvalidInput(f"{name} {what} is not supported here: {self.why}", param=name)


def _dimensions(value: Any, info: ValidationInfo) -> int | None:
    rules: Any = info.context
    if value is not None and (type(value) is not int or not 1 <= value <= rules.dimension):
        problem = f"must be a whole number from 1 to {rules.dimension} (this model's own), not {_shown(value)}"
        raise InvalidInput(f"{info.field_name} {problem}", param=info.field_name)
    return value


def _dimensions_or_all(value: Any, info: ValidationInfo) -> int | None:
    return None if type(value) is int and value == 0 else _dimensions(value, info)


def _one_or_two(texts: Any) -> Any:
    if not isinstance(texts, list):
        raise PydanticCustomError(_WRONG_TYPE, "a list of one or two strings")
    if texts == [""]:
        raise PydanticCustomError("string_too_short", "")
    if len(texts) not in {1, 2}:
        problem = f"is a list of {len(texts)} strings, but a pair has 2; send one text or a pair"
        raise PydanticCustomError(_WRONG, f"{problem}, and over HTTP a batch as a list of lists")
    return texts


# A bound in a schema may be the name of a value; `openapi.py` replaces it by the server's own value.
Text = Annotated[str, Field(min_length=1)]
TextOrPair = Text | Annotated[list[str], Field(min_length=1, max_length=2), BeforeValidator(_one_or_two)]
TokenId = Annotated[
    int,
    Field(ge=0, le=2**31 - 1, json_schema_extra={"maximum": "largest_id"}),
    Constraint("a token id (a whole number from 0)"),
]
TokenIds = Annotated[
    list[TokenId],
    Field(min_length=1, description="Token ids of this model, special tokens included."),
    Constraint("a list of token ids"),
]
MaybeNoIds = Annotated[list[TokenId], Constraint("a list of token ids")]
TextsOrIds = Annotated[list[Text | TokenIds], Constraint("a list of strings", "max_inputs", not_first=(int, float))]
Inputs = Annotated[
    Text | TextsOrIds | TokenIds,
    Field(description="A text, a list of texts, a list of token ids, or a list of such lists."),
]
_KEEP = "Keep only this many numbers of each vector (Matryoshka models)."
Dimensions = Annotated[
    Annotated[int, Field(ge=1, json_schema_extra={"maximum": "dimension"})] | None,
    BeforeValidator(_dimensions),
    Field(description=_KEEP),
]
DimensionsOrAll = Annotated[  # Infinity's and Ollama's
    Annotated[int, Field(ge=0, json_schema_extra={"maximum": "dimension"})] | None,
    BeforeValidator(_dimensions_or_all),
    Field(description=f"{_KEEP} 0: all."),
]
WholeFrom0 = Annotated[int, Field(ge=0), Constraint("a whole number from 0")]
WholeFrom1 = Annotated[int, Field(ge=1), Constraint("a whole number from 1")]
Model = Annotated[Annotated[str, AfterValidator(_known_model)] | None, Field(json_schema_extra={"enum": "models"})]
RequestId = Annotated[str, Field(max_length=128)]  # the bound of x-request-id; each chunk of a stream repeats it
Prompt = Annotated[str | None, Field(json_schema_extra={"enum": "prompts"})]


class Fields(BaseModel):
    """Some of a request's fields. The docstring under a field is its description in the OpenAPI document.

    A subclass adds to these mappings, whose keys are names of fields:

    - `unsupported`: fields that are refused, except for some values.
    - `refused`: fields of which something is refused.
    - `unused`: fields without effect, and why.
    - `other_names`: other names of fields -> the field.
    """

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    refused: ClassVar[Mapping[str, Refusal]] = {}
    unused: ClassVar[Mapping[str, str]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}
    _required: ClassVar[dict[str, None]] = {}
    _rare: ClassVar[frozenset[str]] = frozenset()  # bodies without these fields skip `_resolve`

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._required = {name: None for name, field in cls.model_fields.items() if field.is_required()}
        bases = [vars(base) for base in reversed(cls.__mro__)]
        for table in ("unsupported", "refused", "unused", "other_names"):
            setattr(cls, table, {name: one for base in bases for name, one in base.get(table, {}).items()})
        cls._rare = frozenset((*cls.unsupported, *cls.other_names))
        _NAMES.update(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, fields: Any) -> Any:
        """Drop null fields. Set required fields that are missing to null, so that the error says what they must be."""
        if not isinstance(fields, dict):
            names = " and ".join(cls._required)
            raise PydanticCustomError(_WRONG_TYPE, f"an object with {names}" if names else "an object")
        if None in fields.values():
            fields = {name: value for name, value in fields.items() if value is not None}
        if not cls._rare.isdisjoint(fields):
            fields = cls._resolve(dict(fields))
        return fields if cls._required.keys() <= fields.keys() else cls._required | fields

    @classmethod
    def _resolve(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Replace other names by the field's own. Raises InvalidInput for unsupported fields."""
        for name in cls.unsupported.keys() & fields.keys():
            cls.unsupported[name].check(name, fields[name])
        for name in cls.other_names.keys() & fields.keys():
            own, value = cls.other_names[name], fields.pop(name)
            if fields.setdefault(own, value) != value:
                raise InvalidInput(f"{own} and {name} have different values; send only one of them", param=name)
        return fields

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name, (same, why) in cls.unsupported.items():
            properties[name] = {"enum": [*same, None], "description": f"Other values are refused{why and f': {why}'}."}
        for name, why in cls.unused.items():
            properties[name] = {"description": f"No effect: {why}."}
        for name, own in cls.other_names.items():
            properties[name] = {**properties[own], "description": f"The same as {own}."}
        cls._require_one_of_names(handler.resolve_ref_schema(found))
        return found

    @classmethod
    def _require_one_of_names(cls, schema: dict[str, Any]) -> None:
        """In the schema, allow a required field under any of its names."""
        for own in cls._required.keys() & set(cls.other_names.values()):
            schema["required"].remove(own)
            names = [own, *(name for name, of in cls.other_names.items() if of == own)]
            schema.setdefault("allOf", []).append({"anyOf": [{"required": [name]} for name in names]})

    @classmethod
    def _refusal(cls, errors: Sequence[ErrorDetails]) -> InvalidInput | None:
        """The error if a value is one of `refused`."""
        for error in errors:
            path, value = _path(error["loc"]), error["input"]
            refusal = cls.refused.get(str(path[0])) if len(path) == 1 else None
            if refusal is not None and value in refusal.values:
                return refusal.error(str(path[0]), value)
        return None

    @classmethod
    def parse(cls, body: Any, rules: Rules) -> Self:
        """Parse a body, given as bytes or as parsed JSON. Raises InvalidInput, EmptyInput or UnknownModel."""
        if body == b"":
            raise InvalidInput("the body is empty; send a JSON object")
        try:
            content = orjson.loads(body) if isinstance(body, bytes) else body
            found: Self = cls.__pydantic_validator__.validate_python(content, context=rules)  # faster than its wrapper
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"the body is not valid JSON: {error}") from None
        except ValidationError as invalid:
            errors = invalid.errors(include_url=False)
            raise cls._refusal(errors) or _problem(errors) from None
        return found


def says(body: Mapping[str, Any] | None, *names: str) -> bool:
    """Whether a JSON body has one of these fields, not null."""
    return body is not None and any(body.get(name) is not None for name in names)


def one_or_many(sent: Any) -> Sequence[Any]:
    """A list of queries. A single text or a single list of token ids becomes a list of one."""
    return [sent] if isinstance(sent, str) or isinstance(sent[0], int) else sent


def _problem(errors: Sequence[ErrorDetails]) -> InvalidInput:
    """The most useful error as one sentence.

    A value that may have several types has an error for each. Errors about a value of the right type come before errors
    about the wrong type, and deeper errors before shallow ones. The sentence names all types that the value may have.
    """
    found = [(_path(error["loc"]), error["type"], error) for error in errors]
    path, kind, error = max(found, key=lambda one: (one[1] in _EMPTY, one[1] == _WRONG, one[0]))
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    param = str(path[0]) if path else None
    if kind in _EMPTY:
        return EmptyInput(f"{where} {_EMPTY[kind]}", param=param)
    if kind == _WRONG:
        return InvalidInput(f"{where} {error['msg']}", param=param)
    if kind == _TOO_LONG:
        most = error["ctx"]["max_length"]
        problem = f"{where} has {len(error['input'])} characters and this server accepts {most}"
        return InvalidInput(problem, param=param)
    *others, last = dict.fromkeys(
        _TYPES.get(kind, error["msg"].removeprefix("Input should be ")) for at, kind, error in found if at == path
    )
    words = f"{', '.join(others)} or {last}" if others else last
    if error["input"] is None and path and isinstance(path[-1], str):
        return InvalidInput(f"{where} is missing; send {words}", param=param)
    return InvalidInput(f"{where or 'the body'} must be {words}, not {_shown(error['input'])}", param=param)


def _path(found: Sequence[str | int]) -> tuple[str | int, ...]:
    return tuple(part for at, part in enumerate(found) if not at or isinstance(part, int) or part in _NAMES)


def _shown(value: Any) -> str:
    """A number or a short string as it is; for other values, the name of their JSON type."""
    if isinstance(value, str) and len(value) <= _SHORT:
        return repr(value)
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value)) or str(value)
