"""Answers that HTTP and gRPC share: vectors in the requested shape, scores, and the content of `/info`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.embedding.request import Embedded
from deployments.embedding.router import Router
from deployments.hardware.device_detector import CPU
from deployments.models.model_files import SCORING, ModelCard
from serve_app.version import VERSION

Vector = npt.NDArray[np.float32]


def shape_vectors(done: Embedded, *, unit: bool, dimensions: int | None) -> Sequence[Vector]:
    """Unit vectors, or vectors with the model's own lengths; cut to `dimensions` numbers, then normalized if `unit`."""
    vectors = done.vectors
    if not unit:
        vectors = [vector * np.float32(norm) for vector, norm in zip(vectors, done.norms, strict=True)]
    if dimensions is None:
        return vectors
    cut = [vector[:dimensions] for vector in vectors]
    return [vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12)) for vector in cut] if unit else cut


def cut_rows(texts: Sequence[Vector], dimensions: int | None) -> Sequence[Vector]:
    """Cut the token vectors of each text, [tokens, numbers], to `dimensions` numbers, and normalize them again."""
    if dimensions is None:
        return texts
    cut = [rows[:, :dimensions] for rows in texts]
    return [rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12)) for rows in cut]


def scores(done: Embedded, *, raw: bool) -> Vector:
    """Float32 [queries, labels]: logits if `raw`; else, as TEI, the sigmoid of one label or the softmax of several."""
    logits = np.stack(done.vectors)
    if raw:
        return logits
    if logits.shape[1] == 1:
        return np.float32(1) / (1 + np.exp(-logits.astype(np.float64))).astype(np.float32)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares: Vector = powers / powers.sum(1, keepdims=True)
    return shares


def best_first(some: Vector) -> list[tuple[int, np.float32]]:
    """(index, score) pairs of a row of scores, the best first. Equal scores keep their order."""
    return [(int(index), some[index]) for index in np.argsort(-some, kind="stable")]


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
