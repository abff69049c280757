"""Calls of tools in a model's answers: how they are written, which text is one, and a grammar that asks for one. Pure.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once or more, also after a text: Qwen, Hermes
llama    {"name": ..., "parameters": {...}}, the whole answer; several are separated by semicolons: Llama 3.1 to 3.3
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from deployments.generation.text.grammar import json_of, lark_grammar

Form = Literal["hermes", "llama"]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS: Mapping[Form, str] = {"hermes": "arguments", "llama": "parameters"}
_BLANKS = " \t\r\n"


def form_of(template: str | None) -> Form | None:
    """How a model of this chat template writes calls. None if it has no tools, or another form."""
    if template is None or "tools" not in template or "<function=" in template:  # Qwen3-Coder's are not JSON
        return None
    if _OPEN in template:
        return "hermes"
    return "llama" if '"parameters": dictionary of argument name' in template else None


def call_grammar(form: Form, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """The grammar of an answer that calls one of these functions (OpenAI's `function`: `name`, `parameters`), or
    `several` times. Llama's calls are then one, too. Raises ValueError if the schemas are too large.
    """
    lines = [
        "start: call",
        f"one: {' | '.join(f'f{at}' for at in range(len(functions)))}",
    ]
    if form == "hermes":
        lines[0] += r' ("\n" call)*' if several else ""
        lines.append(rf'call: "{_OPEN}\n" one "\n{_CLOSE}"')
    else:
        lines.append("call: one")
    for at, one in enumerate(functions):
        begins = json.dumps(f'{{"name": "{one["name"]}", "{_ARGUMENTS[form]}": ')
        lines += [f'f{at}: {begins} a{at} "}}"', f"a{at}: {json_of(one.get('parameters') or {'type': 'object'})}"]
    return lark_grammar(lines)


class Call(NamedTuple):
    """A call of a function. `arguments`: JSON."""

    name: str
    arguments: str


class CallParser:
    """Takes the calls out of an answer's text, piece by piece. Text that is no call after all stays text."""

    def __init__(self, form: Form) -> None:
        self._form, self._held = form, ""
        self._plain = self._called = False  # it is text to its end; it has had a call

    def add(self, piece: str) -> tuple[str, list[Call]]:
        """The new text and the calls that are complete now."""
        self._held += piece
        if self._form == "llama":
            if self._plain or self._held.lstrip(_BLANKS)[:1] not in {"", "{"}:
                self._plain = True
                return self._released(), []
            return "", []
        text, calls = "", list[Call]()
        while (begins := self._held.find(_OPEN)) >= 0 and (ends := self._held.find(_CLOSE, begins)) >= 0:
            found = _calls(self._held[begins + len(_OPEN) : ends], "hermes")
            ends += len(_CLOSE)
            text += self._held[:begins].rstrip(_BLANKS) if found else self._held[:ends]  # no blanks beside calls
            calls += found
            self._called |= bool(found)
            self._held = self._held[ends:]
        if begins < 0:
            keep = len(self._held.rstrip(_BLANKS))
            keep -= next((size for size in range(len(_OPEN) - 1, 0, -1) if self._held[:keep].endswith(_OPEN[:size])), 0)
            keep = len(self._held[:keep].rstrip(_BLANKS))
            text += self._held[:keep]
            self._held = self._held[keep:]
        return text, calls

    def end(self) -> tuple[str, list[Call]]:
        """What is left at the answer's end."""
        begins = self._held.find(_OPEN) if self._form == "hermes" else 0
        found = _calls(self._held[begins:].removeprefix(_OPEN), self._form) if begins >= 0 else []
        if not found:
            return ("" if self._called and not self._held.strip(_BLANKS) else self._released()), []
        return self._held[:begins].rstrip(_BLANKS), found

    def _released(self) -> str:
        text, self._held = self._held, ""
        return text


def _calls(text: str, form: Form) -> list[Call]:
    """The calls that this text is; none if it is anything else."""
    found, decoder = list[Call](), json.JSONDecoder()
    text = text.strip(_BLANKS)
    while text:
        try:
            one, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(one, dict) or not isinstance(name := one.get("name"), str):
            return []
        arguments = one.get(_ARGUMENTS[form], {})
        found.append(Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
        text = text[end:].lstrip(_BLANKS + (";" if form == "llama" else ""))
    return found
