"""The gRPC call of generation (`generation.proto`): over the same Router, with the same bounds and sentences as
`completions_api.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from deployments.errors import EmptyInput, InvalidInput, WindveError
from deployments.generation.request import Asked, Piece
from deployments.generation.router import GenerationRouter
from deployments.generation.text.sampling import Picked
from serve_app.api_keys import ApiKeys
from serve_app.generation.answers import TokenNames
from serve_app.generation.generation_services import GENERATE, SERVICE
from serve_app.generation.group import Generations
from serve_app.generation.request_builder import Asking
from serve_app.generation.requests import ChatRequest, CompletionRequest
from serve_app.grpc_services import TIME_LEFT
from serve_app.observe.facts import Followed
from serve_app.observe.observer import Observer
from serve_app.proto.generation_pb2 import ChatMessage, GenerateRequest, GenerateResponse, Token, Usage
from serve_app.rpc.calls import Received, asked_by, check_size, headers_to_follow, metadata_of, say, set_status
from serve_app.rpc.health import POOL_SERVICES, HealthCalls

_OPTIONS = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "n")


class GenerationCalls:
    """Of one Router replica: the method has the name of its call, and Serve's name for the context."""

    def __init__(
        self, router: GenerationRouter, asking: Asking, names: TokenNames, api_keys: ApiKeys | None, observer: Observer
    ) -> None:
        self._router, self._asking, self._names = router, asking, names
        self._api_keys, self._observer = api_keys, observer
        self._max_bytes = router.settings.limits.max_body_bytes
        self._emulated = [("x-windve-emulated", "true")] if router.settings.emulated else []
        health = HealthCalls([SERVICE], self._is_served)
        self.Check, self.Watch = health.Check, health.Watch

    async def Generate(self, request: Received, grpc_context: RayServegRPCContext) -> AsyncGenerator[Message, None]:
        """What is wrong becomes the call's status, behind an empty message (`grpc_services`)."""
        followed = self._observer.begin(headers_to_follow(grpc_context)) if self._observer.on else None
        problem: BaseException | None = None
        try:
            say(grpc_context, *self._emulated)
            async with aclosing(self._answers(request, grpc_context, followed)) as answers:
                async for message in answers:
                    yield message
        except WindveError as error:
            problem = error
            set_status(grpc_context, error)
            yield Empty()
        except BaseException as error:
            problem = asyncio.CancelledError() if isinstance(error, GeneratorExit) else error
            raise
        finally:
            if followed is not None:
                self._observer.end_call(followed, GENERATE, problem)

    def _is_served(self, service: str, model: str | None) -> bool:
        """Raises UnknownModel."""
        if model is not None:
            self._asking.rules.check_model(model)
        live = self._router.live_pools
        return live.get(POOL_SERVICES[service], False) if service in POOL_SERVICES else any(live.values())

    async def _answers(
        self, request: Received, context: RayServegRPCContext, followed: Followed | None
    ) -> AsyncGenerator[GenerateResponse, None]:
        asked = await self._asked(request, context, followed)
        generations = Generations(self._router, asked.answers, followed)
        try:
            await generations.begin([asked])
            async with aclosing(generations.pieces()) as pieces:
                async for answer, piece in pieces:
                    yield self._message(answer, piece, logprobs=asked.logprobs is not None)
            usage = Usage(prompt_tokens=len(asked.ids), completion_tokens=generations.tokens)
            yield GenerateResponse(usage=usage)
        finally:
            await generations.close()

    async def _asked(self, request: Received, context: RayServegRPCContext, followed: Followed | None) -> Asked:
        """Raises InvalidInput, Unauthorized or EngineFailed."""
        received = asyncio.get_running_loop().time()
        shown = metadata_of(context, "authorization")
        client = None if self._api_keys is None else self._api_keys.check(shown)
        if followed is not None and client is not None:
            followed.key = client.tenant.name
        if isinstance(request, InvalidInput):
            raise request
        check_size(request.ByteSize(), self._max_bytes)
        parsed = self._parsed(request, metadata_of(context, "model"))
        admission = asked_by(context)
        left_ms = metadata_of(context, TIME_LEFT)
        if left_ms is not None and int(left_ms) / 1000 < admission.get("timeout_s", self._router.config.ttft_s):
            admission["timeout_s"] = max(1, int(left_ms)) / 1000
        prompts = await self._asking.prompts(parsed)
        (asked,) = self._asking.wanted(parsed, prompts, admission, client=client, received=received)
        return asked

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
                raise EmptyInput("there is no input; send a prompt, ids or a chat", param="prompt")
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
    """What the request says, by the names of OpenAI's routes."""
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
