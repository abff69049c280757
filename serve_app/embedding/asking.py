"""Asks one model's Router what a request says, over HTTP or gRPC, and describes it (`/info`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.embedding.request import Embedded, Request
from deployments.embedding.router import Router
from deployments.hardware.device_detector import CPU
from deployments.models.model_files import SCORING, ModelCard
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Query
from serve_app.embedding.facts import EmbeddingFacts
from serve_app.embedding.options import prompt_names
from serve_app.embedding.routes import ModelRoute
from serve_app.observe.facts import TracedRequest
from serve_app.version import VERSION
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


def model_type(card: ModelCard) -> dict[str, Any]:
    """TEI's `model_type` for a model."""
    if card.kind not in SCORING:
        return {"embedding": {"pooling": card.pooling}}
    names = {str(number): label for number, label in enumerate(card.labels)}
    return {card.kind: {"id2label": names, "label2id": {label: number for number, label in enumerate(card.labels)}}}


def describe(router: Router) -> dict[str, Any]:
    """The content of `/info`: TEI's fields, and windve's own under `windve`."""
    card, limits, config = router.card, router.settings.limits, router.config
    pools = router.describe_pools()
    members = [member for pool in pools.values() for member in pool["replicas"].values()]
    return {
        "model_id": card.name,
        "model_sha": router.space,
        "model_dtype": members[0]["dtype"] if members else None,
        "served_model_name": card.name,
        "model_type": model_type(card),
        "max_concurrent_requests": router.capacity,
        "max_input_length": card.max_tokens,
        "max_batch_tokens": router.settings.accelerator.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": limits.max_inputs_per_request,
        "auto_truncate": limits.auto_truncate,
        "tokenization_workers": 1,
        "version": VERSION,
        "windve": {
            "emulated": router.settings.emulated,
            "cpu_overflow": router.topology.cpu_overflow and not router.pools[CPU].left_out,
            "topology": router.topology_reason,
            "slo_s": config.slo_s,
            "kind": card.kind,
            "kinds": card.kinds,
            "space": router.space,
            "revision": card.revision,
            "dimension": card.dimension,
            "normalize": card.normalize,
            "parameters": card.parameters,
            "router": router.replica,
            **router.about_process(),
            "routers": router.routers,
            "busy_answers": router.refused,
            "config_problem": router.config_problem,
            "calibration": config.calibration.model_dump() if config.calibration else None,
            "admission": config.admission,
            "pools": pools,
            "recent": router.metrics.recent.describe(),
        },
    }
