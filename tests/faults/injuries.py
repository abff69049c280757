"""The faults: each is done when its context is entered, and mended, where that is not the service's own affair, when it
is left.
"""

import asyncio
import contextlib
import copy
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil

from calibration.load import request_bytes
from tests.faults.rig import EMBEDDERS, Rig
from tests.faults.traffic import Traffic
from tests.faults.verdict import BEGUN, GRPC, HTTP, LARGE, REFUSED, Fault

OF_A_NODE = frozenset({LARGE, BEGUN, REFUSED})  # that goes
_HANG_UPS = 60


@dataclass(frozen=True, slots=True)
class Injury:
    """`hold_s`: so long it lasts under load before it is mended. `cannot`: why it cannot be done here, or None."""

    fault: Fault
    do: Callable[[Rig, Traffic, random.Random], AbstractContextManager[None]]
    hold_s: float = 0.0
    cannot: Callable[[Rig], str | None] = lambda _: None


def killed(*roles):
    @contextlib.contextmanager
    def do(rig, traffic, chance):
        chance.choice(rig.of_role(*roles)).send_signal(signal.SIGKILL)
        yield

    return do


@contextlib.contextmanager
def haproxy_killed(rig, traffic, chance):
    """The one that takes connections: those that it has replaced only serve theirs to the end."""
    max(rig.of_role("haproxy"), key=psutil.Process.create_time).send_signal(signal.SIGKILL)
    yield


def stopped(*roles):
    @contextlib.contextmanager
    def do(rig, traffic, chance):
        process = chance.choice(rig.of_role(*roles))
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # Serve has replaced it
                process.send_signal(signal.SIGCONT)

    return do


@contextlib.contextmanager
def node_killed(rig, traffic, chance):
    rig.victim.kill()
    yield
    rig.add_worker()


@contextlib.contextmanager
def node_cut_off(rig, traffic, chance):
    """No packet reaches its address, and nobody is told. Another node comes in its place."""
    node = rig.victim
    route = ["blackhole", f"{node.address}/32", "table", "local"]
    subprocess.run(["ip", "route", "add", *route], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", *route], check=True)
    node.kill()
    rig.add_worker()


@contextlib.contextmanager
def channels_reset(rig, traffic, chance):
    """Every connection of theirs between a Router and a replica ends with RST; Ray's own, to whose ports others connect
    as well, stay.
    """
    processes = rig.processes()
    routers = {process for process, role in processes.items() if role == "Router"}
    replicas = {process for process, role in processes.items() if role in EMBEDDERS}
    listening = {port for process in replicas for port in _listening(process)}
    to = {address for router in routers for address in _connected_to(router) if address.port in listening}
    to -= {address for process in processes.keys() - routers for address in _connected_to(process)}
    assert to, "no Router is connected with a replica"
    for address in to:
        subprocess.run(["ss", "-K", "-t", "dst", f"{address.ip}:{address.port}"], check=True, capture_output=True)
    yield


def _connected_to(process):
    with contextlib.suppress(psutil.Error):
        return [c.raddr for c in process.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    return []


def _listening(process):
    return [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


@contextlib.contextmanager
def redeployed(rig, traffic, chance):
    """Half the SLO's depth for a run, by `serve deploy`, and the config as it was again."""
    before = copy.deepcopy(rig.router)
    rig.router["accelerator"]["queue_depth"] = 20
    rig.deploy()
    yield
    rig.application["deployments"][0]["user_config"] = before
    rig.deploy()


@contextlib.contextmanager
def disk_full(rig, traffic, chance):
    filler = rig.fill_disk()
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def clients_hang_up(rig, traffic, chance):
    """In the middle of a request, or before its answer."""

    async def hang_up(number):
        await asyncio.sleep(number / _HANG_UPS)
        _, writer = await traffic.address.open()
        request = request_bytes({"input": [traffic.text() for _ in range(3)]})
        writer.write(request if number % 2 else request[: len(request) // 2])
        await asyncio.sleep(0.3 * number / _HANG_UPS)
        writer.transport.abort()

    async def all_of_them():
        await asyncio.gather(*map(hang_up, range(_HANG_UPS)))

    traffic.run(all_of_them())
    yield


def _needs(command):
    return lambda _: None if os.geteuid() == 0 and shutil.which(command) else f"{command}, and root, are needed"


def _needs_disk(rig):
    return None if rig.has_disk else "only root can give the logs a disk of their own"


INJURIES = (
    Injury(Fault("a Router killed", frozenset({LARGE})), killed("Router")),
    Injury(Fault("an embedder killed"), killed(*EMBEDDERS)),
    Injury(Fault("an embedder stopped for 4 s", silences=True), stopped(*EMBEDDERS), 4.0),
    Injury(Fault("Routers' connections to replicas reset"), channels_reset, 2.0, _needs("ss")),
    Injury(Fault(f"{_HANG_UPS} clients hang up"), clients_hang_up),
    Injury(Fault("depths redeployed by `serve deploy`"), redeployed),
    Injury(Fault("the HAProxy killed", frozenset({HTTP, GRPC})), haproxy_killed),
    Injury(Fault("Serve's controller killed"), killed("ServeController")),
    Injury(Fault("a node killed, another joins", OF_A_NODE), node_killed, 4.0),
    Injury(Fault("the disk of logs full for 6 s"), disk_full, 6.0, _needs_disk),
    Injury(Fault("a node cut off for 8 s, another joins", OF_A_NODE, silences=True), node_cut_off, 8.0, _needs("ip")),
)
