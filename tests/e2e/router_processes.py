"""The Routers of a running service: their processes, and each one's own address."""

import contextlib
import json
import urllib.request
from collections import Counter
from http.client import HTTPException

import psutil

from calibration.load import Address
from tests.kit.service import wait_until


def get_info(address):
    with urllib.request.urlopen(f"{address}/info", timeout=10) as answer:
        return json.load(answer)


def routers(service):
    """Each Router's process and its own address, past the proxy."""
    found = {}
    for process in psutil.Process(service.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if "Router" not in " ".join(process.cmdline()):
                continue
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    with contextlib.suppress(OSError, ValueError, HTTPException):
                        address = Address("127.0.0.1", connection.laddr.port)
                        if get_info(address)["windve"]["router"]:
                            found[process.pid] = address
    return found


def wait_for_routers(service, count):
    def are_there():
        application = service.status()["applications"]["windve"]
        states = Counter(replica["state"] for replica in application["deployments"]["Router"]["replicas"])
        return application["status"] == "RUNNING" and states == {"RUNNING": count} and len(routers(service)) == count

    wait_until(are_there, f"{count} Routers", timeout_s=120)
