"""Turns a client's request into the Router's, for both HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from deployments.admission.quota import Client
from deployments.errors import ContextExceeded, InvalidInput
from deployments.generation.request import WantedGeneration
from deployments.generation.router import GenerationRouter
from deployments.generation.text.grammar import Grammars
from deployments.generation.text.prompt_encoder import Prompt, PromptEncoder
from deployments.generation.text.sampling import Sampling
from deployments.generation.text.tool_calls import form_of
from serve_app.api_keys import UNNAMED
from serve_app.generation.requests import ChatRequest, CompletionRequest, CompletionRules


class RequestBuilder:
    """Builds the requests to one model."""

    def __init__(self, router: GenerationRouter, rules: CompletionRules, *, parse_special_tokens: bool) -> None:
        """`parse_special_tokens`: see `PromptEncoder`. Raises SettingsError if the chat template cannot be used."""
        self.rules = rules
        self._card = router.card
        self._prompts = PromptEncoder(router.card, router.tokenizer, parse_special_tokens=parse_special_tokens)
        self.form = form_of(self._card.chat_template)
        words = self._card.model.vocab_size
        self._grammars = Grammars(lambda: router.tokenizer, words, self._card.end_tokens)

    def close(self) -> None:
        """Stop the prompt encoder and the compiler of grammars."""
        self._prompts.close()
        self._grammars.close()

    async def grammar(self, asked: CompletionRequest | ChatRequest) -> str:
        """The grammar that binds a request's answers, as in `Sampling`. Raises InvalidInput if it cannot be used."""
        if not (grammar := asked.grammar_in(self.form)):
            return ""
        param = "tools" if isinstance(asked, ChatRequest) and asked.offered else "response_format"
        if not self._card.end_tokens:
            raise InvalidInput(f"{param} is not supported here: this model has no end token; leave it out", param=param)
        try:
            await asyncio.wrap_future(self._grammars.compile(grammar))
        except ValueError as error:
            raise InvalidInput(f"{param} cannot be used: {error}", param=param) from None
        return grammar

    async def prompts(self, asked: CompletionRequest | ChatRequest) -> list[Prompt]:
        """The prompts as token ids; a chat is one prompt. Raises InvalidInput, EmptyInput, ContextExceeded or
        EngineFailed.
        """
        if isinstance(asked, ChatRequest):
            messages = [one.plain for one in asked.messages]
            return [await self._prompts.of_chat(messages, asked.chat_template_kwargs, asked.ends, asked.offered)]
        return [
            await self._prompts.of_text(one) if isinstance(one, str) else self._prompts.of_ids(one)
            for one in asked.prompts
        ]

    def text_of(self, prompt: str | Sequence[int]) -> str:
        """The text of a prompt, for `echo`."""
        return prompt if isinstance(prompt, str) else self._prompts.text_of(prompt)

    def wanted(
        self,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[Prompt],
        admission: Mapping[str, Any],
        *,
        client: Client | None,
        received: float,
        grammar: str = "",
    ) -> list[WantedGeneration]:
        """One generation per prompt. `admission`: from the headers (see `web.request_headers`). `received`: as in
        `WantedGeneration`. `grammar`: as `grammar` found. Raises ContextExceeded or InvalidInput.
        """
        tokenizing_s = sum(prompt.seconds for prompt in prompts)
        param = "messages" if isinstance(asked, ChatRequest) else "prompt"
        sampling, scored = self._sampling(asked, grammar), asked.prompt_alternatives
        return [
            WantedGeneration(
                ids=prompt.ids,
                most_tokens=self._most_tokens(asked.most_tokens, len(prompt.ids), param),
                may_shorten=asked.most_tokens is None,
                sampling=sampling,
                answers=asked.n,
                stops=asked.stops,
                logprobs=asked.alternatives,
                prompt_logprobs=scored,
                ignore_end=asked.ignore_eos,
                stop_tokens=tuple(asked.stop_token_ids),
                continues=isinstance(asked, CompletionRequest) or asked.ends == "within",
                timeout_s=admission.get("timeout_s"),
                bulk=scored is not None or admission.get("bulk", False),
                client=client,
                received=received,
                tokenizing_s=tokenizing_s,
                cache_scope=None if scored is not None else _cache_scope(client, asked.cache_salt),
                let_in=place > 0,
            )
            for place, prompt in enumerate(prompts)
        ]

    def _sampling(self, asked: CompletionRequest | ChatRequest, grammar: str) -> Sampling:
        """Raises InvalidInput for tokens that the model does not have, and for more least than most tokens."""
        known = self._card.model.vocab_size
        sampling = replace(asked.sampling(self._card.defaults), grammar=grammar)
        named = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_token_ids": asked.stop_token_ids}
        for param, tokens in named.items():
            if tokens and max(tokens) >= known:
                problem = f"{param} has token id {max(tokens)}, outside this model's vocabulary of {known}"
                raise InvalidInput(problem, param=param)
        if asked.most_tokens is not None and asked.min_tokens > asked.most_tokens:
            problem = (
                f"min_tokens is {asked.min_tokens} and max_tokens {asked.most_tokens}; send no more than max_tokens"
            )
            raise InvalidInput(problem, param="min_tokens")
        return sampling

    def _most_tokens(self, wanted: int | None, prompt: int, param: str) -> int:
        """The most tokens that an answer may have after a prompt of `prompt` tokens. Raises ContextExceeded."""
        context = self._card.context
        if prompt >= context:
            problem = f"the prompt has {prompt} tokens, but the model's context is {context}; shorten the prompt"
            raise ContextExceeded(problem, param=param)
        if wanted is not None and prompt + wanted > context:
            raise ContextExceeded(
                f"the prompt has {prompt} tokens and max_tokens is {wanted}, but the model's context is {context}; "
                f"shorten the prompt, or set max_tokens to at most {context - prompt}",
                param=param,
            )
        left = context - prompt
        return wanted or (left if param == "messages" else min(self.rules.default_tokens, left))


def _cache_scope(client: Client | None, salt: str | None) -> bytes | None:
    """`WantedGeneration.cache_scope`: the same for requests with the same named key and the same `cache_salt`. Clients
    without a named key may be anyone, so they share only what they ask to share.
    """
    name = "" if client is None or client.tenant.name == UNNAMED else client.tenant.name
    if not name and salt is None:
        return None
    return blake2b(f"{name}\0{salt or ''}".encode(), digest_size=16).digest()
