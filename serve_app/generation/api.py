"""OpenAI's routes to a model that generates, streamed or not, and the routes that describe the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from deployments.generation.request import WantedGeneration
from deployments.generation.router import GenerationRouter
from deployments.generation.settings import GenerationSettings
from deployments.models.tokenizer import Token, Tokenizer
from serve_app.api_keys import ApiKeys
from serve_app.generation.answers import ChatReply, Reply, ReplyHead, TextReply, TokenNames, fingerprint
from serve_app.generation.document import document
from serve_app.generation.group import Generations
from serve_app.generation.request_builder import RequestBuilder
from serve_app.generation.requests import ChatRequest, CompletionOptions, CompletionRequest, CompletionRules
from serve_app.observe.observer import Observer
from serve_app.version import VERSION
from serve_app.web.about import CHATS, COMPLETIONS, ModelApi, Routes
from serve_app.web.asgi import Answer, HttpRequest, dumps
from serve_app.web.errors import JSON
from serve_app.web.event_stream import EVENTS, EventStream, StreamBounds
from serve_app.web.fields import Fields
from serve_app.web.request_headers import admission
from serve_app.web.tokenizer_routes import TokenizerRoutes

Body = TypeVar("Body", bound=Fields)


class CompletionsApi(ModelApi):
    """The routes to one model in one Router replica."""

    def __init__(
        self,
        router: GenerationRouter,
        settings: GenerationSettings,
        api_keys: ApiKeys | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Raises SettingsError if the model's chat template or tokenizer cannot be used."""
        self._router, self._limits = router, settings.limits
        self._max_bytes = self._limits.body_bytes(router.card.context)
        rules = _rules(settings)
        super().__init__(rules, router, api_keys, observer, emulated=settings.emulated, has_page=settings.page)
        self.names = TokenNames(router.tokenizer)
        self._fingerprint = fingerprint(router.card.model)
        self.asking = RequestBuilder(router, rules, parse_special_tokens=self._limits.special_tokens_in_chats)
        self._document = document(rules, router.card.model.vocab_size, api_keys=api_keys is not None)

    def _own_routes(self) -> Routes:
        card = self._router.card
        tokenizer = _Threaded(Tokenizer(card.model, self._router.tokenizer))
        return {
            **{("POST", path): self.completions for path in COMPLETIONS},
            **{("POST", path): self.chat for path in CHATS},
            **TokenizerRoutes(tokenizer, card.context, self._rules, self._max_bytes).handlers,
        }

    def close(self) -> None:
        """Stop the prompt encoder."""
        self.asking.close()

    async def completions(self, request: HttpRequest) -> Answer:
        asked = await self._parsed(CompletionRequest, request)
        wanted = await self._wanted(asked, request)
        before = [self.asking.text_of(one) if asked.echo else "" for one in asked.prompts]
        choices = [text for text in before for _ in range(asked.n)]
        head = self._head(asked, wanted, request)
        head = head._replace(echoed=asked.echoed_logprobs, only_prompt=asked.max_tokens == 0)
        reply = TextReply(head, choices, self.names, logprobs=asked.alternatives is not None)
        return await self._generate(asked, wanted, reply, request)

    async def chat(self, request: HttpRequest) -> Answer:
        asked = await self._parsed(ChatRequest, request)
        wanted = await self._wanted(asked, request)
        form = self.asking.form if asked.offered else None
        head, logprobs = self._head(asked, wanted, request), asked.alternatives is not None
        reply = ChatReply(head, [""] * asked.n, self.names, form, logprobs=logprobs)
        return await self._generate(asked, wanted, reply, request)

    async def _wanted(self, asked: CompletionRequest | ChatRequest, request: HttpRequest) -> list[WantedGeneration]:
        headers = admission(request.headers)
        received = asyncio.get_running_loop().time() - headers.get("waited_s", 0.0)
        grammar = await self.asking.grammar(asked)
        prompts = await self.asking.prompts(asked)
        return self.asking.wanted(asked, prompts, headers, client=request.client, received=received, grammar=grammar)

    async def _parsed(self, kind: type[Body], request: HttpRequest) -> Body:
        return kind.parse(await request.body(self._max_bytes), self._rules)

    def _head(self, asked: CompletionOptions, wanted: Sequence[WantedGeneration], request: HttpRequest) -> ReplyHead:
        prompt_tokens = sum(len(one.ids) for one in wanted)
        name, records = request.named(asked.request_id), [one.record for one in wanted]
        prompts = [one.ids for one in wanted for _ in range(asked.n)]
        about = asked.return_token_ids, asked.prompt_logprobs
        return ReplyHead(name, self._rules.model, self._fingerprint, prompt_tokens, records, prompts, *about)

    async def _generate(
        self, asked: CompletionOptions, wanted: Sequence[WantedGeneration], reply: Reply, request: HttpRequest
    ) -> Answer:
        generations = Generations(self._router, asked.n, request.traced)
        try:
            await request.while_here(generations.begin(wanted))
            if asked.stream:
                reply.says_usage = asked.stream_options.include_usage
                reply.says_usage_always = asked.stream_options.continuous_usage_stats
                events = _events(generations, reply)
                bounds = StreamBounds(self._limits.sse_keepalive_s, self._limits.slow_reader_s)
                return list(EVENTS), EventStream(events, generations.close, bounds)
            await request.while_here(_collect(generations, reply))
        except BaseException:
            await generations.close()
            raise
        await generations.close()
        if asked.alternatives is None and asked.prompt_alternatives is None:
            return [JSON], dumps(reply.whole())
        return [JSON], dumps(await asyncio.to_thread(reply.whole))  # thousands of tokens may have to be named

    def _model(self, name: str) -> dict[str, Any]:
        return {**super()._model(name), "max_model_len": self._router.card.context}

    def describe(self) -> dict[str, Any]:
        card = self._router.card
        ours = {"space": self._router.space, "revision": card.model.revision, **self._router.describe()}
        return {
            "model_id": card.name,
            "model_sha": self._router.space,
            "served_model_name": card.name,
            "model_type": {"generation": {}},
            "max_input_length": card.context,
            "version": VERSION,
            "windve": ours,
        }


def _rules(settings: GenerationSettings) -> CompletionRules:
    model, limits = settings.model, settings.limits
    return CompletionRules(
        *(model.served_name, 0, limits.max_prompts, tuple(model.aliases), model.any_name),
        default_tokens=limits.default_tokens,
        max_answers=limits.max_answers,
    )


class _Threaded:
    """Calls a tokenizer in threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        special_tokens: bool,
        prompt_name: str | None,  # noqa: ARG002 - these models have no prompts
    ) -> list[list[Token]]:
        return await asyncio.to_thread(self._tokenizer.tokens, texts, special_tokens=special_tokens)

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        return await asyncio.to_thread(self._tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)


async def _events(generations: Generations, reply: Reply) -> AsyncGenerator[bytes, None]:
    async with aclosing(generations.pieces()) as pieces:
        async for index, piece in pieces:
            if said := reply.events(index, piece):
                yield said
    yield reply.end()


async def _collect(generations: Generations, reply: Reply) -> None:
    async with aclosing(generations.pieces()) as pieces:
        async for index, piece in pieces:
            reply.add(index, piece)
