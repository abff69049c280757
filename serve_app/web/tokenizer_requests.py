"""Request bodies of `/tokenize`, `/decode` and `/detokenize`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from serve_app.web.fields import Constraint, Fields, MaybeNoIds, Model, Prompt, Text, TokenIds, Unsupported, one_or_many

_NO_CHATS = "only texts can be tokenized here, not chats"


class TokenizeRequest(Fields):
    """TEI's `POST /tokenize`."""

    inputs: Text | Annotated[list[Text], Constraint("a list of strings", "max_inputs")]
    add_special_tokens: bool = True
    prompt_name: Prompt = None
    """The model's prompt to put before each input. Null: the model's default, if it has one."""

    @property
    def texts(self) -> Sequence[str]:
        return one_or_many(self.inputs)


class TokenizePromptRequest(Fields):
    """vLLM's `POST /tokenize`. None of the model's prompts is put before the text."""

    model: Model = None
    prompt: Text
    add_special_tokens: bool = True

    unsupported: ClassVar = {
        "return_token_strs": Unsupported((False,), "inputs instead of prompt gives each token's text"),
        **dict.fromkeys(("messages", "chat_template", "tools"), Unsupported(why=_NO_CHATS)),
        **dict.fromkeys(
            ("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"), Unsupported(({},), _NO_CHATS)
        ),
        "add_generation_prompt": Unsupported((True,), _NO_CHATS),
        "continue_final_message": Unsupported((False,), _NO_CHATS),
    }


class DecodeRequest(Fields):
    """TEI's `POST /decode`."""

    ids: (
        TokenIds | Annotated[list[MaybeNoIds], Constraint("a list of such lists", "max_inputs", not_first=(int, float))]
    )
    skip_special_tokens: bool = True

    @property
    def id_lists(self) -> Sequence[Sequence[int]]:
        return one_or_many(self.ids)


class DetokenizeRequest(Fields):
    """vLLM's `POST /detokenize`."""

    model: Model = None
    tokens: TokenIds
