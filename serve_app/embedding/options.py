"""How queries become token ids, and what vLLM's routes have in common: the base of the types of bodies. Pure."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deployments.models.text_pairs import NO_BOUNDS, Side, TokenBounds
from serve_app.embedding.input_types import InputType
from serve_app.web.fields import Constraint, Fields, Prompt, RequestId, Unsupported

PRIORITY = Unsupported((0,), "the header x-windve-priority: bulk lets others go first")
USER = "clients are told apart by their API keys"
_VLLM = {
    "padding": Unsupported(("do_not_pad",), "no text is padded to the model's length"),
    "priority": PRIORITY,
    "mm_processor_kwargs": Unsupported(({},), "only texts are read"),
    "add_special_tokens": Unsupported((True,), "models are trained with their special tokens"),
    "messages": Unsupported(why="chats are not read here, only texts"),
    "add_generation_prompt": Unsupported((False,), "chats are not read here, only texts"),
    "continue_final_message": Unsupported((False,), "chats are not read here, only texts"),
    "chat_template": Unsupported(why="chats are not read here, only texts"),
    "chat_template_kwargs": Unsupported(({},), "chats are not read here, only texts"),
    "media_io_kwargs": Unsupported(({},), "only texts are read"),
}
_VLLM_UNUSED = {"user": USER, "cache_salt": "no answer is kept for another request"}


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
    request_id: RequestId | None = None
    """What the answer's id ends with, in place of the header x-request-id."""

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
