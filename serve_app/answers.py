"""What is said alike over HTTP and gRPC: vectors as they were asked for, and what `/info` tells."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.router import Embedded, Router

VERSION = importlib.metadata.version("windve")

Vector = npt.NDArray[np.float32]


def shape_vectors(done: Embedded, *, unit: bool, dimensions: int | None) -> Sequence[Vector]:
    """Unit vectors or the model's own lengths; cut to the first `dimensions` numbers (and made unit again)."""
    vectors = done.vectors
    if not unit:
        vectors = [vector * np.float32(norm) for vector, norm in zip(vectors, done.norms, strict=True)]
    if dimensions is None:
        return vectors
    cut = [vector[:dimensions] for vector in vectors]
    return [vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12)) for vector in cut] if unit else cut


def describe(router: Router) -> dict[str, Any]:
    """`/info`: TEI's fields, and what is particular to windve under `windve`."""
    card, limits, config = router.card, router.settings.limits, router.config
    pools = router.describe_pools()
    members = [member for pool in pools.values() for member in pool["replicas"].values()]
    return {
        "model_id": card.name,
        "model_sha": card.revision,
        "model_dtype": members[0]["dtype"] if members else None,
        "served_model_name": card.name,
        "model_type": {"embedding": {"pooling": card.pooling}},
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
            "heterogeneous": router.topology.heterogeneous,
            "topology": router.topology.reason,
            "slo_s": config.slo_s if config else None,
            "dimension": card.dimension,
            "normalize": card.normalize,
            "parameters": card.parameters,
            "router": router.replica,
            "busy_answers": router.refused,
            "config_problem": router.config_problem,
            "calibration": config.calibration.model_dump() if config and config.calibration else None,
            "trial_depths": router.trial_depths,
            "pools": pools,
        },
    }
