"""Tools in chats, as OpenAI has them: the functions offered, which must be called, and calls in messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deployments.errors import InvalidInput
from deployments.generation.text.tool_calls import Form, call_grammar
from serve_app.web.fields import Constraint, Fields

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$"), Constraint("1 to 64 letters, digits, _, - or .")]


class Function(Fields):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""


class Tool(Fields):
    """A function, offered to the model."""

    type: Literal["function"]
    function: Function

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        said = {"name": self.function.name, "description": self.function.description or ""}
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**said, "parameters": parameters}}


class CalledFunction(Fields):
    """A call in an earlier answer."""

    name: Name
    arguments: str
    """JSON."""


class ToolCall(Fields):
    """A call in an earlier answer, with the id that the message with its result names."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it, with the arguments as an object. Raises InvalidInput."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            problem = f"the arguments of the tool call {self.function.name} in messages are not JSON"
            raise InvalidInput(problem, param="messages") from None
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def _choice(value: Any) -> Any:
    match value:
        case "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return {"function": name}
    problem = 'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}'
    raise InvalidInput(problem, param="tool_choice")


ToolChoice = Annotated[str | dict[str, str], BeforeValidator(_choice)]


def grammar_of_calls(
    form: Form | None, tools: Sequence[Tool], choice: str | Mapping[str, str], *, several: bool
) -> str:
    """The grammar of an answer that must call a function, or `several` if any will do; empty if it need not. `form`:
    how the model writes calls; None if it writes none that are known. Raises InvalidInput.
    """
    if tools and choice != "none" and form is None:
        why = "this model's chat template has no calls of a known form"
        raise InvalidInput(f"tools is not supported here: {why}; leave it out", param="tools")
    if choice in ("none", "auto"):
        return ""
    names = [choice["function"]] if isinstance(choice, Mapping) else [tool.function.name for tool in tools]
    found = [tool.plain["function"] for tool in tools if tool.function.name in names]
    if not found or form is None:
        raise InvalidInput("tool_choice asks for a function that is not in tools", param="tool_choice")
    try:
        return call_grammar(form, found, several=several and choice == "required")
    except ValueError as error:
        raise InvalidInput(f"tools cannot be used: {error}", param="tools") from None
