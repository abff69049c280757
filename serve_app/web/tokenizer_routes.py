"""The routes to a model's tokenizer: TEI's and vLLM's. No device is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

from deployments.models.tokenizer import Token
from serve_app.web.asgi import Answer, Handler, HttpRequest, json_answer
from serve_app.web.fields import (
    Constraint,
    Fields,
    MaybeNoIds,
    Model,
    Prompt,
    Rules,
    Text,
    TokenIds,
    Unsupported,
    one_or_many,
    says,
)

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


class Tokenizes(Protocol):
    """The model's tokenizer. Both raise EmptyInput or InvalidInput."""

    async def tokenize(
        self, texts: Sequence[str], *, special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]: ...

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class TokenizerRoutes:
    """The routes of one model, which accepts `longest` tokens. A body has at most `max_body_bytes`."""

    tokenizer: Tokenizes
    longest: int
    rules: Rules
    max_body_bytes: int

    @property
    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        return {
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/decode"): self.decode,
            ("POST", "/detokenize"): self.detokenize,
        }

    async def tokenize(self, request: HttpRequest) -> Answer:
        """A body with `prompt` is read as vLLM does, any other as TEI does."""
        sent = await request.json_object(self.max_body_bytes)
        if says(sent, "prompt", "messages") and not says(sent, "inputs"):
            return await self._tokenize_prompt(TokenizePromptRequest.parse(sent, self.rules))
        asked = TokenizeRequest.parse(request.content, self.rules)
        tokens = await self.tokenizer.tokenize(
            asked.texts, special_tokens=asked.add_special_tokens, prompt_name=asked.prompt_name
        )
        return json_answer(tokens)

    async def _tokenize_prompt(self, asked: TokenizePromptRequest) -> Answer:
        (tokens,) = await self.tokenizer.tokenize(
            [asked.prompt], special_tokens=asked.add_special_tokens, prompt_name=""
        )
        ids = [token.id for token in tokens]
        return json_answer({"count": len(ids), "max_model_len": self.longest, "tokens": ids, "token_strs": None})

    async def decode(self, request: HttpRequest) -> Answer:
        """The route of TEI's API."""
        asked = DecodeRequest.parse(await request.body(self.max_body_bytes), self.rules)
        return json_answer(await self.tokenizer.decode(asked.id_lists, skip_special_tokens=asked.skip_special_tokens))

    async def detokenize(self, request: HttpRequest) -> Answer:
        """The route of vLLM's API."""
        asked = DetokenizeRequest.parse(await request.body(self.max_body_bytes), self.rules)
        (text,) = await self.tokenizer.decode([asked.tokens], skip_special_tokens=False)
        return json_answer({"prompt": text})
