"""Ray itself, by what its own commands use: a local one is started, and its dashboard is asked, as `serve deploy` does.

Ray is imported when it is needed: it reads its variables (`ray_variables`) where it is imported first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_OBJECT_STORE_BYTES = 200 * 2**20  # queries travel by the channel; the store holds next to nothing


def start_local_ray(host: str, metrics_port: int, cores: int) -> str:
    """Start a Ray that listens at `host` alone. Returns its dashboard's address."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=cores,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host=host,
        _node_ip_address=host,
        _metrics_export_port=metrics_port,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    return f"http://{context.dashboard_url}"


def deploy_applications(dashboard: str, config: Mapping[str, Any]) -> None:
    """What `serve deploy` does, with the cluster's token if there is one. Raises ConnectionError where nobody answers,
    RuntimeError where the config is refused, and what Ray raises of tokens.
    """
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    ServeSubmissionClient(dashboard).deploy_applications(dict(config))


def serve_details(dashboard: str) -> dict[str, Any]:
    """What Serve's REST API says of its applications. Raises as `deploy_applications`, and ValueError for what is no
    address.
    """
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    found: dict[str, Any] = ServeSubmissionClient(dashboard).get_serve_details()
    return found
