"""What clients send, checked by hand: bytes -> typed request, or InvalidInput with one plain sentence. Pure.

Fields that a route does not know, and fields that are null, are ignored, as clients of all kinds need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from deployments import trial
from deployments.errors import EmptyInput, InvalidInput, UnknownModel
from deployments.models.pairs import Pair
from deployments.models.tokenizer import Query, Side
from deployments.trial import Trial

PRIORITY, TIMEOUT = "x-windve-priority", "x-request-timeout-ms"
_PRIORITY, _TIMEOUT, _TRIAL = PRIORITY.encode(), TIMEOUT.encode(), trial.HEADER.encode()
_TIMEOUT_DIGITS = 9  # eleven days
_LARGEST_ID = 2**31 - 1
_SIDES: dict[Any, Side] = {"left": "left", "Left": "left", "right": "right", "Right": "right"}


@dataclass(frozen=True, slots=True)
class Rules:
    """What this server accepts: its model's name, the size of its vectors, and the bounds on one request."""

    model: str
    dimension: int
    max_inputs: int


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Queries, and how they become token ids: what all routes to the model have in common."""

    queries: Sequence[Query]
    truncate: bool | None
    truncation_direction: Side
    prompt_name: str | None


@dataclass(frozen=True, slots=True)
class OpenAIRequest(EncodeRequest):
    """OpenAI's `POST /v1/embeddings`; the fields of EncodeRequest are an extension."""

    encoding_format: Literal["float", "base64"]
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class EmbedRequest(EncodeRequest):
    """TEI's `POST /embed`."""

    normalize: bool
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class RerankRequest(EncodeRequest):
    """TEI's `POST /rerank`; each query is a pair of the request's query and one of its texts."""

    texts: Sequence[str]
    raw_scores: bool
    return_text: bool


@dataclass(frozen=True, slots=True)
class CohereRequest(EncodeRequest):
    """Cohere's `POST /v1/rerank` and `/v2/rerank`; the fields of EncodeRequest are an extension."""

    texts: Sequence[str]
    top_n: int | None
    return_documents: bool


@dataclass(frozen=True, slots=True)
class PredictRequest(EncodeRequest):
    """TEI's `POST /predict`. `single`: one text or pair was sent, not a batch."""

    single: bool
    raw_scores: bool


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """TEI's `POST /tokenize`."""

    texts: Sequence[str]
    add_special_tokens: bool
    prompt_name: str | None


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """TEI's `POST /decode`."""

    ids: Sequence[Sequence[int]]
    skip_special_tokens: bool


def parse_openai(body: bytes, rules: Rules) -> OpenAIRequest:
    """Raises InvalidInput, EmptyInput, UnknownModel."""
    fields = _object(body)
    _check_model(fields, rules)
    encoding = fields.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise InvalidInput(f"encoding_format must be 'float' or 'base64', not {encoding!r}", param="encoding_format")
    queries = _queries(fields, "input", rules)
    return OpenAIRequest(queries, *_encoding(fields), encoding or "float", _dimensions(fields, rules))


def parse_embed(body: bytes, rules: Rules) -> EmbedRequest:
    """Raises InvalidInput or EmptyInput."""
    fields = _object(body)
    normalize = _flag(fields, "normalize")
    queries = _queries(fields, "inputs", rules)
    return EmbedRequest(queries, *_encoding(fields), normalize is not False, _dimensions(fields, rules))


def parse_embed_sparse(body: bytes, rules: Rules) -> EncodeRequest:
    """TEI's `POST /embed_sparse`. Raises InvalidInput or EmptyInput."""
    return parse_embed_all(body, rules)


def parse_embed_all(body: bytes, rules: Rules) -> EncodeRequest:
    """TEI's `POST /embed_all`. Raises InvalidInput or EmptyInput."""
    fields = _object(body)
    return EncodeRequest(_queries(fields, "inputs", rules), *_encoding(fields))


def parse_similarity(body: bytes, rules: Rules) -> EncodeRequest:
    """TEI's `POST /similarity`: the source sentence is the first query, the others follow. Raises InvalidInput or
    EmptyInput.
    """
    fields = _object(body)
    inputs, parameters = fields.get("inputs"), fields.get("parameters")
    if not isinstance(inputs, dict):
        raise InvalidInput("inputs must be an object with source_sentence and sentences", param="inputs")
    if not isinstance(parameters, dict | None):
        raise InvalidInput(f"parameters must be an object, not {_name(parameters)}", param="parameters")
    source = inputs.get("source_sentence")
    if not isinstance(source, str):
        raise InvalidInput(f"inputs.source_sentence must be a string, not {_name(source)}", param="inputs")
    sentences = _texts(inputs.get("sentences"), "inputs.sentences", rules.max_inputs - 1)
    return EncodeRequest([_text(source, "inputs.source_sentence"), *sentences], *_encoding(parameters or {}))


def parse_rerank(body: bytes, rules: Rules) -> RerankRequest:
    """Raises InvalidInput or EmptyInput."""
    fields = _object(body)
    query = _query_text(fields)
    texts = _strings(fields.get("texts"), "texts", rules)
    pairs = [Pair(query, text) for text in texts]
    raw_scores, return_text = _flag(fields, "raw_scores") is True, _flag(fields, "return_text") is True
    return RerankRequest(pairs, *_encoding(fields), texts, raw_scores, return_text)


def parse_cohere(body: bytes, rules: Rules) -> CohereRequest:
    """Raises InvalidInput, EmptyInput, UnknownModel."""
    fields = _object(body)
    _check_model(fields, rules)
    query = _query_text(fields)
    documents = fields.get("documents")
    if isinstance(documents, list):
        documents = [one.get("text") if isinstance(one, dict) else one for one in documents]
    texts = _strings(documents, "documents", rules)
    top_n = fields.get("top_n")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        shown = top_n if _is_number(top_n) else _name(top_n)
        raise InvalidInput(f"top_n must be a whole number from 1, not {shown}", param="top_n")
    pairs = [Pair(query, text) for text in texts]
    return CohereRequest(pairs, *_encoding(fields), texts, top_n, _flag(fields, "return_documents") is True)


def parse_predict(body: bytes, rules: Rules) -> PredictRequest:
    """Raises InvalidInput or EmptyInput."""
    fields = _object(body)
    inputs = fields.get("inputs")
    single = isinstance(inputs, str) or (isinstance(inputs, list) and isinstance(next(iter(inputs), None), str))
    batch = [inputs] if single else inputs
    if not isinstance(batch, list):
        raise InvalidInput(
            f"inputs must be a string, a pair of strings or a list of them, not {_name(inputs)}", param="inputs"
        )
    if not batch:
        raise EmptyInput("inputs is an empty list; send at least one text", param="inputs")
    _check_count(batch, "inputs", rules.max_inputs)
    queries = [_text_or_pair(one, "inputs" if single else f"inputs[{index}]") for index, one in enumerate(batch)]
    return PredictRequest(queries, *_encoding(fields), single, _flag(fields, "raw_scores") is True)


def parse_tokenize(body: bytes, rules: Rules) -> TokenizeRequest:
    """Raises InvalidInput or EmptyInput."""
    fields = _object(body)
    inputs = fields.get("inputs")
    texts = _texts([inputs] if isinstance(inputs, str) else inputs, "inputs", rules.max_inputs)
    return TokenizeRequest(texts, _flag(fields, "add_special_tokens") is not False, _prompt_name(fields))


def parse_decode(body: bytes, rules: Rules) -> DecodeRequest:
    """Raises InvalidInput or EmptyInput."""
    fields = _object(body)
    ids = fields.get("ids")
    if not isinstance(ids, list):
        raise InvalidInput(f"ids must be a list of token ids, or a list of such lists, not {_name(ids)}", param="ids")
    if not ids:
        raise EmptyInput("ids is an empty list; send at least one token id", param="ids")
    if not isinstance(ids[0], list):
        ids = [ids]
    _check_count(ids, "ids", rules.max_inputs)
    for index, some in enumerate(ids):
        if not isinstance(some, list):
            raise InvalidInput(f"ids[{index}] must be a list of token ids, not {_name(some)}", param="ids")
        _ids(some, f"ids[{index}]")
    return DecodeRequest(ids, _flag(fields, "skip_special_tokens") is not False)


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
    _check_count(value, key, rules.max_inputs)
    return [_query(item, f"{key}[{index}]", key) for index, item in enumerate(value)]


def _check_model(fields: dict[str, Any], rules: Rules) -> None:
    model = fields.get("model")
    if model is not None and model != rules.model:
        if not isinstance(model, str):
            raise InvalidInput(f"model must be a string, not {_name(model)}", param="model")
        raise UnknownModel(f"there is no model '{model}' here; this server has '{rules.model}'", param="model")


def _query_text(fields: dict[str, Any]) -> str:
    query = fields.get("query")
    if not isinstance(query, str):
        raise InvalidInput(f"query must be a string, not {_name(query)}", param="query")
    return query


def _strings(value: Any, key: str, rules: Rules) -> list[str]:
    """The texts of pairs: one of them may be empty."""
    if not isinstance(value, list):
        raise InvalidInput(f"{key} must be a list of strings, not {_name(value)}", param=key)
    if not value:
        raise EmptyInput(f"{key} is an empty list; send at least one text", param=key)
    _check_count(value, key, rules.max_inputs)
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise InvalidInput(f"{key}[{index}] must be a string, not {_name(text)}", param=key)
    return value


def _text_or_pair(item: Any, where: str) -> str | Pair:
    texts = [item] if isinstance(item, str) else item
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidInput(f"{where} must be a string or a list of one or two strings", param="inputs")
    if len(texts) == 1:
        return _text(texts[0], where)
    if len(texts) != 2:
        raise InvalidInput(
            f"{where} is a list of {len(texts)} strings, and a pair has 2; send a batch as a list of lists",
            param="inputs",
        )
    return Pair(*texts)


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
        raise EmptyInput(f"{where} is an empty string; send text or leave it out", param=_param(where))
    return text


def _texts(value: Any, where: str, most: int) -> list[str]:
    if not isinstance(value, list):
        raise InvalidInput(f"{where} must be a list of strings, not {_name(value)}", param="inputs")
    if not value:
        raise EmptyInput(f"{where} is an empty list; send at least one text", param="inputs")
    _check_count(value, where, most)
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise InvalidInput(f"{where}[{index}] must be a string, not {_name(text)}", param="inputs")
        _text(text, f"{where}[{index}]")
    return value


def _check_count(items: list[Any], where: str, most: int) -> None:
    if len(items) > most:
        raise InvalidInput(
            f"{where} has {len(items)} items and this server takes {most} in one request; send fewer at once",
            param=_param(where),
        )


def _encoding(fields: dict[str, Any]) -> tuple[bool | None, Side, str | None]:
    """What EncodeRequest has beside its queries."""
    side = fields.get("truncation_direction")
    if side is not None and (not isinstance(side, str) or side not in _SIDES):
        shown = f"'{side}'" if isinstance(side, str) else _name(side)
        raise InvalidInput(f"truncation_direction must be 'left' or 'right', not {shown}", param="truncation_direction")
    return _flag(fields, "truncate"), _SIDES.get(side, "right"), _prompt_name(fields)


def _prompt_name(fields: dict[str, Any]) -> str | None:
    name = fields.get("prompt_name")
    if name is not None and not isinstance(name, str):
        raise InvalidInput(f"prompt_name must be a string, not {_name(name)}", param="prompt_name")
    return name


def _ids(items: list[Any], where: str) -> list[int]:
    for index, item in enumerate(items):
        if type(item) is not int or not 0 <= item <= _LARGEST_ID:
            shown = item if _is_number(item) else _name(item)
            raise InvalidInput(
                f"{where}[{index}] must be a token id (a whole number from 0), not {shown}",
                param=_param(where),
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


def _param(where: str) -> str:
    """The field of `inputs.sentences[3]` is `inputs`."""
    return re.split(r"[.\[]", where, maxsplit=1)[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _name(value: Any) -> str:
    """A JSON value's type in JSON's own words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
