"""What `response_format` asks of an answer, as the grammar of `deployments.generation.text.grammar`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.errors import InvalidInput
from deployments.generation.text.grammar import json_grammar

_SHAPE = 'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}'


def grammar_of(response_format: Mapping[str, Any] | None) -> str:
    """The grammar, or an empty string if any text will do. Raises InvalidInput."""
    match response_format:
        case None | {"type": "text"}:
            return ""
        case {"type": "json_object"}:
            schema: Mapping[str, Any] = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            pass
        case _:
            raise InvalidInput(f"response_format {_SHAPE}", param="response_format")
    try:
        return json_grammar(schema)
    except ValueError as error:
        raise InvalidInput(f"response_format cannot be used: {error}", param="response_format") from None
