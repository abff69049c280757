"""What clients send, checked by hand: bytes -> typed request, or InvalidInput with one plain sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from deployments.errors import EmptyInput, InvalidInput, UnknownModel
from deployments.tokenizer import Query

_LARGEST_ID = 2**31 - 1
_TIMEOUT_DIGITS = 9  # eleven days


@dataclass(frozen=True, slots=True)
class Rules:
    """What this server accepts: its model's name, the size of its vectors, and the bounds on one request."""

    model: str
    dimension: int
    max_inputs: int


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """OpenAI's `POST /v1/embeddings`."""

    queries: Sequence[Query]
    encoding_format: Literal["float", "base64"]
    dimensions: int | None
    truncate: bool | None


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """TEI's `POST /embed`."""

    queries: Sequence[Query]
    normalize: bool
    dimensions: int | None
    truncate: bool | None


def parse_openai(body: bytes, rules: Rules) -> EmbeddingsRequest:
    """Unknown and null fields are ignored, as OpenAI's clients need. Raises InvalidInput, EmptyInput, UnknownModel."""
    fields = _object(body)
    model = fields.get("model")
    if model is not None and model != rules.model:
        if not isinstance(model, str):
            raise InvalidInput(f"model must be a string, not {_name(model)}", param="model")
        raise UnknownModel(f"there is no model '{model}' here; this server has '{rules.model}'", param="model")
    encoding = fields.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise InvalidInput(f"encoding_format must be 'float' or 'base64', not {encoding!r}", param="encoding_format")
    return EmbeddingsRequest(
        queries=_queries(fields, "input", rules),
        encoding_format=encoding or "float",
        dimensions=_dimensions(fields, rules),
        truncate=_flag(fields, "truncate"),
    )


def parse_tei(body: bytes, rules: Rules) -> EmbedRequest:
    """Unknown and null fields are ignored. Raises InvalidInput or EmptyInput."""
    fields = _object(body)
    normalize = _flag(fields, "normalize")
    return EmbedRequest(
        queries=_queries(fields, "inputs", rules),
        normalize=normalize is not False,
        dimensions=_dimensions(fields, rules),
        truncate=_flag(fields, "truncate"),
    )


def parse_timeout(header: bytes) -> float:
    """The header `x-request-timeout-ms` in seconds. Raises InvalidInput."""
    if not (header.isdigit() and len(header) <= _TIMEOUT_DIGITS and int(header)):
        raise InvalidInput(
            f"the header x-request-timeout-ms should be whole milliseconds from 1, not '{header.decode('latin-1')}'"
        )
    return int(header) / 1000


def _object(body: bytes) -> dict[str, Any]:
    if not body:
        raise InvalidInput("the body is empty; send a JSON object")
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidInput(f"the body must be a JSON object, not {_name(fields)}")
    return fields


def _queries(fields: dict[str, Any], key: str, rules: Rules) -> Sequence[Query]:
    value = fields.get(key)
    if value is None:
        raise InvalidInput(f"{key} is missing; send a string or a list of strings", param=key)
    if isinstance(value, str):
        return [_text(value, key)]
    if not isinstance(value, list):
        raise InvalidInput(f"{key} must be a string, a list of strings or token ids, not {_name(value)}", param=key)
    if not value:
        raise EmptyInput(f"{key} is an empty list; send at least one text", param=key)
    if _is_number(value[0]):
        return [_ids(value, key)]
    if len(value) > rules.max_inputs:
        raise InvalidInput(
            f"{key} has {len(value)} items and this server takes {rules.max_inputs} in one request; send fewer at once",
            param=key,
        )
    return [_query(item, f"{key}[{index}]", key) for index, item in enumerate(value)]


def _query(item: Any, where: str, key: str) -> Query:
    if isinstance(item, str):
        return _text(item, where)
    if isinstance(item, list):
        if not item:
            raise EmptyInput(f"{where} is an empty list of token ids; leave it out", param=key)
        return _ids(item, where)
    raise InvalidInput(f"{where} must be a string or a list of token ids, not {_name(item)}", param=key)


def _text(text: str, where: str) -> str:
    if not text:
        raise EmptyInput(f"{where} is an empty string; send text or leave it out", param=where.partition("[")[0])
    return text


def _ids(items: list[Any], where: str) -> list[int]:
    for index, item in enumerate(items):
        if type(item) is not int or not 0 <= item <= _LARGEST_ID:
            shown = item if _is_number(item) else _name(item)
            raise InvalidInput(
                f"{where}[{index}] must be a token id (a whole number from 0), not {shown}",
                param=where.partition("[")[0],
            )
    return items


def _dimensions(fields: dict[str, Any], rules: Rules) -> int | None:
    return check_dimensions(fields.get("dimensions"), rules.dimension)


def check_dimensions(value: Any, largest: int) -> int | None:
    """How many numbers of a vector are asked for, if fewer than all. Raises InvalidInput."""
    if value is not None and (type(value) is not int or not 1 <= value <= largest):
        shown = value if _is_number(value) else _name(value)
        raise InvalidInput(
            f"dimensions must be a whole number from 1 to {largest} (this model's own), not {shown}",
            param="dimensions",
        )
    return value


def _flag(fields: dict[str, Any], key: str) -> bool | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{key} must be true or false, not {_name(value)}", param=key)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _name(value: Any) -> str:
    """A JSON value's type in JSON's own words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
