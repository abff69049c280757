"""Base classes of request bodies: how queries become token ids, and the fields that an API's routes share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from deployments.models.colbert import Role
from deployments.models.outputs import Outputs
from deployments.models.text_pairs import NO_BOUNDS, Side, TokenBounds
from serve_app.web.fields import Constraint, Fields, Prompt, RequestId, Unsupported

InputType = Literal["search_query", "search_document", "classification", "clustering", "query", "document", "passage"]

_QUERY = ("query", "search_query", "retrieval.query", "retrieval-query")
_DOCUMENT = ("document", "passage", "search_document", "corpus", "retrieval.passage", "retrieval-document")
_USUAL: Mapping[InputType, tuple[str, ...]] = {  # names of prompts in models' files, lower case; the first found wins
    "search_query": _QUERY,
    "query": _QUERY,
    "search_document": _DOCUMENT,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}

PRIORITY = Unsupported((0,), "the header x-windve-priority: bulk lets others go first")
USER = "clients are told apart by their API keys"
_NO_CHATS, _ONLY_TEXTS = "only texts are read here, not chats", "only texts are supported"
_VLLM = {
    "padding": Unsupported(("do_not_pad",), "texts are never padded to the model's length"),
    "priority": PRIORITY,
    "add_special_tokens": Unsupported((True,), "models need the special tokens that they were trained with"),
    **dict.fromkeys(("messages", "chat_template"), Unsupported(why=_NO_CHATS)),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), Unsupported((False,), _NO_CHATS)),
    "chat_template_kwargs": Unsupported(({},), _NO_CHATS),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), Unsupported(({},), _ONLY_TEXTS)),
}
_VLLM_UNUSED = {"user": USER, "cache_salt": "answers are not cached"}


class AnyOptions(Fields):
    """Options for turning queries into token ids, shared by all routes to the model."""

    truncate: bool | Literal["NONE", "START", "END"] | None = None
    """Truncate inputs longer than the model accepts (START, END: on that side) or refuse them. Null: as in settings."""
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    """The side on which an input that is too long is cut. Null: as the model's tokenizer says, mostly on the right."""
    prompt_name: Prompt = None
    """The model's prompt to put before each input. Empty: none. Null: the model's default, if it has one."""

    @property
    def bounds(self) -> TokenBounds:
        """Bounds on tokens below the model's own."""
        return NO_BOUNDS

    @property
    def cut(self) -> bool | None:
        """Whether to truncate inputs that are too long; None: the server's setting."""
        return self.truncate != "NONE" if isinstance(self.truncate, str) else self.truncate

    @property
    def side(self) -> Side | None:
        """The side on which inputs that are too long are cut; None: as the model's tokenizer says."""
        if isinstance(self.truncate, str):
            return {"START": "left", "END": "right"}.get(self.truncate)  # type: ignore[return-value]
        return self.truncation_direction and ("left" if self.truncation_direction in {"left", "Left"} else "right")

    @property
    def purpose(self) -> InputType | None:
        """What the inputs are for, if the client says so and names no prompt."""
        return None

    @property
    def role(self) -> Role:
        """What the inputs are, for models that encode queries and documents differently."""
        return "document"

    @property
    def outputs(self) -> Outputs:
        """What to compute; empty: what the model's kind gives."""
        return ()

    @property
    def query_options(self) -> AnyOptions:
        return self


class Options(AnyOptions):
    """TEI's options."""

    truncate: bool | None = None
    """Truncate inputs that are longer than the model accepts, or refuse them. Null: the server's setting."""


class VllmOptions(AnyOptions):
    """vLLM's options, added to the common ones."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1), Constraint("a whole number from 1, or -1")] | None = None
    """Truncate inputs with more tokens than this, special tokens included. -1: the model's maximum."""
    request_id: RequestId | None = None
    """The end of the answer's id. Replaces the header x-request-id."""

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
    """Options of Cohere and NIM."""

    input_type: InputType | None = None
    """What the inputs are for. Selects the model's prompt for that use, if it has one."""

    @property
    def purpose(self) -> InputType | None:
        return self.input_type if self.prompt_name is None else None


def prompt_names(prompts: Mapping[str, str]) -> dict[InputType, str]:
    """Input type -> the name of its prompt in a model's `prompts`, or empty if the model has none."""
    known = {name.lower(): name for name in prompts}
    kinds: tuple[InputType, ...] = get_args(InputType)
    return {kind: next((known[name] for name in _USUAL[kind] if name in known), "") for kind in kinds}
