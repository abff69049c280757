"""Renders chats with the model's own template. The template is untrusted code of the model's author, so it runs in its
own process, for a limited time (`template_process`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

from deployments.errors import EngineFailed, InvalidInput, SettingsError
from deployments.generation.text import template_process

PromptEnd = Literal["answer", "turn", "within"]
Message = Mapping[str, Any]  # `role` and `content`, strings, and other fields that the client sent

_SCRIPT = Path(template_process.__file__)
_START_S = 60.0  # enough for a start on a busy machine
_LONGER, _MORE = 8, 2**16  # the most characters of a text: 8 times those of its messages, plus 65,536
_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TZ", "TZDIR", "SYSTEMROOT")
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"})
_FIRST_CHAT = [{"role": "user", "content": "Where does the overflow go?"}]
_USUAL_ROLES = frozenset({"system", "user", "assistant"})
_MARK, _MOST_ROLES = "overflow-7", 64  # remembered roles are limited, because clients choose their names
_MOST_AT_ONCE = 8  # unusual roles in a chat: each new one costs a trial, and others' chats wait meanwhile


class ChatTemplate:
    """A model's chat template. Its methods block: call them in one thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, limit_s: float = 5.0) -> None:
        """Start the process, and try the template on a chat. `limit_s`: the longest time for one chat.

        Raises SettingsError if the template cannot be used.
        """
        self._source, self._special, self._limit_s = source, dict(special_tokens), limit_s
        self._roles: dict[str, bool] = {}  # unusual roles that clients sent, and whether the template renders them
        self._link: socket.socket | None = None
        self._end: weakref.finalize[..., Any] | None = None  # ends the process, also when this object is collected
        try:
            self.render(_FIRST_CHAT)
        except (InvalidInput, EngineFailed) as error:
            self.close()
            raise SettingsError("args.model.id", f"the chat template cannot be used: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        ends: PromptEnd = "answer",
        tools: Sequence[Any] = (),
    ) -> str:
        """The text of a chat. `variables`: additional ones for the template. `ends`: with the beginning of an answer,
        after the last message's turn, or within its turn, right after its content. `tools`: as OpenAI has them.

        Raises InvalidInput if the template refuses the messages, takes too long, or needs too much memory; and
        EngineFailed if its process dies or cannot be started.
        """
        answer = self._written(messages, variables or {}, tools, answers=ends == "answer")
        if "problem" in answer:
            problem = f"the model's chat template refuses these messages: {answer['problem']}"
            raise InvalidInput(problem, param="messages")
        text = answer["text"]
        return _up_to(text, messages[-1]["content"]) if ends == "within" else text

    def check_roles(self, roles: AbstractSet[str]) -> None:
        """Raises InvalidInput if the template ignores messages of one of these roles that follow a user's message."""
        others = sorted(roles - _USUAL_ROLES)
        if len(others) > _MOST_AT_ONCE:
            problem = f"the messages have {len(others)} roles besides system, user and assistant"
            raise InvalidInput(f"{problem}, and this server accepts {_MOST_AT_ONCE}; send fewer", param="messages")
        for role in others:
            if role not in self._roles:
                if len(self._roles) == _MOST_ROLES:
                    self._roles.clear()
                trial = self._written([*_FIRST_CHAT, {"role": role, "content": _MARK}], {})
                self._roles[role] = _MARK in trial.get("text", "")
            if not self._roles[role]:
                problem = f"the model's chat template has no role {role!r}"
                others_are = "use system, user, assistant, or another role that it has"
                raise InvalidInput(f"{problem}; {others_are}", param="messages")

    def _written(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        tools: Sequence[Any] = (),
        *,
        answers: bool = True,
    ) -> dict[str, str]:
        """The answer: `text` or `problem`. Raises InvalidInput if it takes too long, or EngineFailed."""
        if taken := (_OURS | self._special.keys()) & variables.keys():
            problem = f"chat_template_kwargs cannot set {min(taken)}; leave it out"
            raise InvalidInput(problem, param="chat_template_kwargs")
        ours = {"messages": messages, "tools": list(tools) or None, "documents": None, "add_generation_prompt": answers}
        values = [*tools, *(value for message in messages for value in message.values())]
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        most = _LONGER * sum(map(len, texts)) + _MORE
        return self._ask({"variables": {**self._special, **variables, **ours}, "most": most})

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self._link = self._end = None

    def _ask(self, content: Any) -> dict[str, str]:
        for again in (False, True):
            link = self._link or self._start()
            try:
                return self._answered(link, content, self._limit_s)
            except TimeoutError:
                self.close()
                problem = f"the model's chat template took more than {self._limit_s:g} s for these messages"
                raise InvalidInput(problem, param="messages") from None
            except (EOFError, OSError):  # the process was killed, perhaps while it was idle
                self.close()
                if again:
                    raise EngineFailed("the process of the model's chat template died") from None
        raise AssertionError

    def _start(self) -> socket.socket:
        link, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-P", "-B", str(_SCRIPT)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        self._link, self._end = link, weakref.finalize(self, _end, process, link)
        try:
            answer = self._answered(link, self._source, _START_S)
        except (EOFError, OSError) as error:
            self.close()
            problem = f"the process of the model's chat template did not start ({error or type(error).__name__})"
            raise EngineFailed(problem) from None
        if "problem" in answer:
            self.close()
            raise EngineFailed(f"the model's chat template is invalid: {answer['problem']}")
        return link

    @staticmethod
    def _answered(link: socket.socket, content: Any, limit_s: float) -> dict[str, str]:
        """Send content and wait for the answer, which comes as a whole. Raises TimeoutError, EOFError or OSError."""
        link.settimeout(limit_s)
        template_process.send(link, content)
        found: dict[str, str] = template_process.receive(link)
        return found


def _up_to(text: str, content: str) -> str:
    """The text up to the end of its last message's content, as transformers' `continue_final_message` cuts it."""
    at = text.rfind(content.strip())
    if at < 0 or not content.strip():
        problem = "the last message cannot be continued: it is empty, or the model's chat template changes it"
        raise InvalidInput(problem, param="messages")
    whole = content.lstrip()
    return text[: at + len(whole if text.startswith(whole, at) else whole.rstrip())]


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    process.kill()
    process.wait()
