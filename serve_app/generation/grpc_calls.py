"""The gRPC call of generation (`generation.proto`). It has the same Router, bounds and error texts as `api.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from deployments.errors import EmptyInput, InvalidInput
from deployments.generation.request import Piece, WantedGeneration
from deployments.generation.router import GenerationRouter
from deployments.generation.text.sampling import Picked
from deployments.serve_adapter.grpc_handlers import TIME_LEFT
from serve_app.api_keys import ApiKeys
from serve_app.generation.answers import TokenNames
from serve_app.generation.generation_services import GENERATE, SERVICE
from serve_app.generation.group import Generations
from serve_app.generation.request_builder import RequestBuilder
from serve_app.generation.requests import ChatRequest, CompletionRequest
from serve_app.observe.observer import Observer
from serve_app.proto.generation_pb2 import ChatMessage, GenerateRequest, GenerateResponse, Token, Usage
from serve_app.rpc import CallScope, GrpcService, Received, asked_by, is_live, metadata_of, say
from serve_app.web.request_headers import SPACE

_OPTIONS = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "cache_salt")


class GenerationCalls(GrpcService):
    """The call to one Router replica. Serve finds the method by the call's name, and passes `grpc_context` by name."""

    def __init__(
        self,
        router: GenerationRouter,
        asking: RequestBuilder,
        names: TokenNames,
        api_keys: ApiKeys | None,
        observer: Observer,
    ) -> None:
        settings = router.settings
        max_bytes = settings.limits.body_bytes(router.card.context)
        super().__init__([SERVICE], api_keys, observer, max_bytes=max_bytes, emulated=settings.emulated)
        self._router, self._asking, self._names = router, asking, names

    async def Generate(self, request: Received, grpc_context: RayServegRPCContext) -> AsyncGenerator[Message, None]:
        """Stream the answers. An error becomes the call's status, after an empty message (see `grpc_handlers`)."""
        with CallScope(self.observer, GENERATE, grpc_context) as scope:
            say(grpc_context, (SPACE, self._router.space), *self._emulated)
            async with aclosing(self._answers(request, grpc_context, scope)) as answers:
                async for message in answers:
                    yield message
            return
        yield Empty()

    def is_served(self, service: str, model: str | None) -> bool:
        """Raises UnknownModel."""
        if model is not None:
            self._asking.rules.check_model(model)
        return is_live(service, self._router.live_pools)

    async def _answers(
        self, request: Received, context: RayServegRPCContext, scope: CallScope
    ) -> AsyncGenerator[GenerateResponse, None]:
        wanted = await self._wanted(request, context, scope)
        generations = Generations(self._router, wanted.answers, scope.traced)
        try:
            await generations.begin([wanted])
            async with aclosing(generations.pieces()) as pieces:
                async for answer, piece in pieces:
                    yield self._message(answer, piece, logprobs=wanted.logprobs is not None)
            cached, tokens = wanted.record.cached_tokens, generations.tokens
            usage = Usage(prompt_tokens=len(wanted.ids), completion_tokens=tokens, cached_tokens=cached)
            yield GenerateResponse(usage=usage)
        finally:
            await generations.close()

    async def _wanted(self, request: Received, context: RayServegRPCContext, scope: CallScope) -> WantedGeneration:
        """Check the caller and parse the request. Raises InvalidInput, Unauthorized or EngineFailed."""
        received = asyncio.get_running_loop().time()
        client = self.let_in(context)
        scope.came_from(client)
        admission = asked_by(context, self._router.space)  # its wait ends here: what follows counts from `received`
        parsed = self._parsed(self.checked(request), metadata_of(context, "model"))
        waited_s = admission.get("waited_s", 0.0)
        if (left_ms := metadata_of(context, TIME_LEFT)) is not None:
            allowed_s = waited_s + max(1, int(left_ms)) / 1000  # gRPC counts from now, `timeout_s` from the arrival
            if allowed_s < admission.get("timeout_s", self._router.config.ttft_s):
                admission["timeout_s"] = allowed_s
        prompts = await self._asking.prompts(parsed)
        (wanted,) = self._asking.wanted(parsed, prompts, admission, client=client, received=received - waited_s)
        return wanted

    def _parsed(self, request: Any, model: str | None) -> CompletionRequest | ChatRequest:
        """Raises InvalidInput, EmptyInput or UnknownModel."""
        rules, options = self._asking.rules, {"model": model, **_options(request)}
        logprobs = request.logprobs if request.HasField("logprobs") else None
        match request.WhichOneof("input"):
            case "chat":
                likely = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
                return ChatRequest.parse({**options, **likely, **_chat(request)}, rules)
            case "prompt":
                prompt: Any = request.prompt
            case "ids":
                prompt = list(request.ids.ids)
            case _:
                raise EmptyInput("the request has no input; send a prompt, ids or a chat", param="prompt")
        return CompletionRequest.parse({**options, "logprobs": logprobs, "prompt": prompt}, rules)

    def _message(self, answer: int, piece: Piece, *, logprobs: bool) -> GenerateResponse:
        tokens = self._tokens(piece.tokens) if logprobs else ()
        return GenerateResponse(answer=answer, text=piece.text, tokens=tokens, finish_reason=piece.finish or "")

    def _tokens(self, picked: tuple[Picked, ...]) -> Iterator[Token]:
        for one in picked:
            alternatives = [self._token(*other) for other in one.alternatives]
            yield self._token(one.id, one.logprob, alternatives)

    def _token(self, token: int, logprob: float | None, alternatives: list[Token] | None = None) -> Token:
        names = self._names
        utf8 = bytes(names.bytes(token))
        return Token(id=token, text=names.text(token), utf8=utf8, logprob=logprob, alternatives=alternatives)


def _options(request: GenerateRequest) -> dict[str, Any]:
    """The request's options, by their names in OpenAI's API."""
    said = {name: getattr(request, name) for name in _OPTIONS if request.HasField(name)}
    return {**said, "stop": list(request.stop), "ignore_eos": request.ignore_eos}


def _chat(request: GenerateRequest) -> dict[str, Any]:
    """Raises InvalidInput."""
    try:
        kwargs = MessageToDict(request.chat.chat_template_kwargs)
    except ValueError as error:
        raise InvalidInput(f"chat_template_kwargs is not JSON: {error}", param="chat_template_kwargs") from None
    return {"messages": [_turn(one) for one in request.chat.messages], "chat_template_kwargs": kwargs}


def _turn(message: ChatMessage) -> dict[str, Any]:
    named = {"name": message.name} if message.HasField("name") else {}
    return {"role": message.role, "content": message.content, **named}
