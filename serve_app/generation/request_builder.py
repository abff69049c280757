"""What a client's request asks of the Router, the same over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.admission.quota import Client
from deployments.errors import ContextExceeded
from deployments.generation.request import WantedGeneration
from deployments.generation.router import GenerationRouter
from deployments.generation.text.prompt_encoder import PromptEncoder
from deployments.models.tokenizer import TokenIds
from serve_app.generation.requests import ChatRequest, CompletionRequest, CompletionRules


class RequestBuilder:
    """Of one model."""

    def __init__(self, router: GenerationRouter, rules: CompletionRules, *, parse_special_tokens: bool) -> None:
        """`parse_special_tokens`: see `PromptEncoder`. Raises SettingsError where the chat template cannot be used."""
        self.rules = rules
        self._card = router.card
        self._prompts = PromptEncoder(router.card, router.tokenizer, parse_special_tokens=parse_special_tokens)

    def close(self) -> None:
        """End what was started for it."""
        self._prompts.close()

    async def prompts(self, asked: CompletionRequest | ChatRequest) -> list[TokenIds]:
        """As token ids; a chat is one. Raises InvalidInput, EmptyInput, ContextExceeded or EngineFailed."""
        if isinstance(asked, ChatRequest):
            return [await self._prompts.of_chat([one.plain for one in asked.messages], asked.chat_template_kwargs)]
        return [
            await self._prompts.of_text(one) if isinstance(one, str) else self._prompts.of_ids(one)
            for one in asked.prompts
        ]

    def text_of(self, prompt: str | Sequence[int]) -> str:
        """For its echo."""
        return prompt if isinstance(prompt, str) else self._prompts.text_of(prompt)

    def wanted(
        self,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[TokenIds],
        admission: Mapping[str, Any],
        *,
        client: Client | None,
        received: float,
    ) -> list[WantedGeneration]:
        """One generation a prompt. `admission`: what the headers say (`admission_headers`). `received`: as in
        `WantedGeneration`. Raises ContextExceeded or InvalidInput.
        """
        param = "messages" if isinstance(asked, ChatRequest) else "prompt"
        return [
            WantedGeneration(
                ids=ids,
                most_tokens=self._most_tokens(asked.most_tokens, len(ids), param),
                sampling=asked.sampling(self._card.defaults),
                answers=asked.n,
                stops=asked.stops,
                logprobs=asked.alternatives,
                ignore_end=asked.ignore_eos,
                timeout_s=admission.get("timeout_s"),
                bulk=admission.get("bulk", False),
                client=client,
                received=received,
                let_in=place > 0,
            )
            for place, ids in enumerate(prompts)
        ]

    def _most_tokens(self, wanted: int | None, prompt: int, param: str) -> int:
        """Of an answer to a prompt of so many tokens. Raises ContextExceeded."""
        context = self._card.context
        if prompt >= context:
            problem = f"the prompt has {prompt} tokens and the model takes {context} with the answer; shorten it"
            raise ContextExceeded(problem, param=param)
        if wanted is not None and prompt + wanted > context:
            raise ContextExceeded(
                f"the prompt has {prompt} tokens and max_tokens asks for {wanted} more, and the model takes {context}; "
                f"shorten the prompt, or ask for {context - prompt} at most",
                param=param,
            )
        return wanted or min(self.rules.default_tokens, context - prompt)
