"""Asks one model's Router what a request says, over HTTP or gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.embedding.request import Embedded, Request
from deployments.embedding.router import Router
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Query
from serve_app.embedding.facts import EmbeddingFacts
from serve_app.embedding.options import prompt_names
from serve_app.embedding.routes import ModelRoute
from serve_app.observe.facts import TracedRequest
from serve_app.web.fields import Rules


class Asking:
    """The requests to one model in one Router replica. `rules`: for parsing them."""

    def __init__(self, router: Router) -> None:
        limits, card, called = router.settings.limits, router.card, router.settings.model
        self.router, self.card = router, card
        self.rules = Rules(
            card.name, card.dimension, limits.max_inputs_per_request, tuple(called.aliases), called.any_name
        )
        self._prompt_names = prompt_names(card.prompts)

    async def ask(
        self,
        route: ModelRoute,
        asked: Any,
        queries: Sequence[Query],
        traced: TracedRequest | None,
        **admission: Any,
    ) -> Embedded:
        """The answers to the queries of the request `asked`; they are admitted or refused together. `admission`:
        further fields of `Request`. Raises what `Router.embed` raises.
        """
        options = asked.query_options
        purpose = options.purpose
        request = Request(
            queries,
            kinds=route.kinds,
            cuts=Cuts(options.cut, options.side, options.bounds),
            prompt_name=options.prompt_name if purpose is None else self._prompt_names[purpose],
            role=options.role,
            outputs=route.outputs or options.outputs,
            **admission,
        )
        if traced is not None:
            traced.facts, request.parts = EmbeddingFacts(request), []
        return await self.router.embed(request)
