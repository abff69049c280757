"""Waits for the Routers of a running service, whose own addresses are `Service.routers`."""

import json
import urllib.request
from collections import Counter

from tests.kit.service import wait_until


def get_info(address):
    with urllib.request.urlopen(f"{address}/info", timeout=10) as answer:
        return json.load(answer)


def wait_for_routers(service, count):
    def are_there():
        application = service.status()["applications"]["windve"]
        states = Counter(replica["state"] for replica in application["deployments"]["Router"]["replicas"])
        return application["status"] == "RUNNING" and states == {"RUNNING": count} and len(service.routers()) == count

    wait_until(are_there, f"{count} Routers", timeout_s=120)
