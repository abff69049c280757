"""`make soak MINUTES=60`: load at 1.2 times capacity while one fault after another is done to a real service, each with
quiet after it: all faults once, and then again until the time is over. Writes `report.md` and `memory.png`; exits 1 if
a promise was broken, or a fault not reached.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from deployments.hardware.device_detector import probe_machine
from tests.faults import memory, verdict
from tests.faults.agenda import agenda, capacity
from tests.faults.injuries import INJURIES, Injury
from tests.faults.memory import Life
from tests.faults.rig import DEVICES, NODES, SLO_S, Rig
from tests.faults.traffic import Traffic
from tests.faults.verdict import Phase
from tests.kit.service import ROOT

OVERLOAD = 1.2
LEAD_S, TAIL_S = 1.5, 1.0  # of load before a fault, and once the service is whole again
WHOLE_S = 120.0  # so long a service may take to be whole again
DRAINED_S, STILL_S = 100.0, 20.0  # for what is in flight to end; for the metrics to say so
LONGEST_MIN = 15.0  # for the first round; a fault that is not reached until then counts as a broken promise
SAMPLED_EVERY_S = 10.0


class Memory:
    """Samples the resident memory of each process, in a thread of its own."""

    def __init__(self, rig: Rig):
        self._rig, self._lives = rig, {}
        self.began = time.monotonic()
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._enough.set()
        self._thread.join()

    @property
    def lives(self) -> list[Life]:
        return [life for life in self._lives.values() if len(life.samples) > 1]

    def _watch(self):
        while not self._enough.wait(SAMPLED_EVERY_S):
            for process, role in self._rig.processes().items():
                try:
                    size = process.memory_info().rss
                except psutil.Error:
                    continue
                life = self._lives.setdefault(process, Life(role, process.pid))
                life.samples.append((time.monotonic() - self.began, size))


def phase_of(injury: Injury, rig: Rig, traffic: Traffic, chance: random.Random) -> Phase:
    """Load, the fault in it, and quiet."""
    problems = []
    traffic.go()
    time.sleep(LEAD_S)
    injected_at = time.monotonic()
    try:
        with injury.do(rig, traffic, chance):
            time.sleep(injury.hold_s)
    except Exception as error:  # noqa: BLE001 - an hour's other faults go on, and the run fails
        problems.append(f"it could not be done: {error!r}")
    healed_at = time.monotonic()
    whole_s, missing = rig.wait_until_whole(WHOLE_S)
    if missing:
        problems.append(missing)
    time.sleep(TAIL_S)
    traffic.pause()
    problems += quiet(rig, traffic)
    return Phase(injury.fault, injected_at, healed_at, traffic.take(), whole_s, problems)


def quiet(rig: Rig, traffic: Traffic) -> list[str]:
    """Wait until nothing is in flight, at the clients and by the metrics. Returns what still is."""
    ends = time.monotonic() + DRAINED_S
    while traffic.in_flight() and time.monotonic() < ends:
        time.sleep(0.1)
    if traffic.in_flight():
        return [f"{traffic.in_flight()} requests have no end"]
    ends, left = time.monotonic() + STILL_S, {}
    while time.monotonic() < ends:
        try:
            left = rig.left_over()
        except (OSError, ValueError, KeyError) as error:
            left = {repr(error): 1}
        if not left:
            return []
        time.sleep(0.5)
    return [f"in the quiet {json.dumps(left)}"]


class Report:
    """`report.md`, written anew after each fault; `requests.jsonl`, which grows; `memory.png`, at the end."""

    def __init__(self, folder: Path, chosen: Sequence[Injury], skipped: Mapping[str, str]):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._chosen, self._skipped = folder, chosen, skipped
        self._requests = folder / "requests.jsonl"
        self._requests.write_text("")
        self.phases: list[Phase] = []
        self.broken: list[str] = []

    def add(self, phase: Phase) -> None:
        self.phases.append(phase)
        found = verdict.problems_of(phase)
        self.broken += found
        print(" | ".join(verdict.rows_of([phase])[0]), flush=True)
        for problem in found:
            print(f"  BROKEN PROMISE: {problem}", flush=True)
        with self._requests.open("a") as file:
            for ended in phase.ended:
                file.write(json.dumps({"fault": phase.fault.name, **asdict(ended)}) + "\n")

    def write(self, lives: Sequence[Life]) -> str:
        """Returns it."""
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
        machine = probe_machine()
        where = f"Commit {commit}, {len(machine.cpu.allowed)} cores of {machine.cpu_model}."
        lines = [
            f"{verdict.summary(self.phases)}. {where}\n",
            verdict.markdown(verdict.HEAD, verdict.rows_of(self.phases)),
            *(f"- skipped: {name}: {why}" for name, why in self._skipped.items()),
            *(f"- broken promise: {problem}" for problem in self.broken),
            "",
            verdict.markdown(memory.HEAD, memory.rows_of(lives)),
        ]
        (self._folder / "report.md").write_text("\n".join(lines))
        return "\n".join(lines)

    def end(self, lives: Sequence[Life], began: float) -> None:
        done = {phase.fault.name for phase in self.phases} | self._skipped.keys()
        self.broken += [f"not reached: {injury.fault.name}" for injury in self._chosen if injury.fault.name not in done]
        self.broken += memory.growing(lives)
        print(self.write(lives), f"\nwritten: {self._folder}")
        at = [phase.injected_at - began for phase in self.phases]
        if lives:
            memory.picture(lives, at).savefig(self._folder / "memory.png")


def soak(rig: Rig, asked: argparse.Namespace) -> list[str]:
    """Returns the promises that were broken."""
    words = asked.only.split(",") if asked.only else [""]
    chosen = [injury for injury in INJURIES if any(word in injury.fault.name for word in words)]
    skipped = {injury.fault.name: why for injury in chosen if (why := injury.cannot(rig))}
    for name, why in skipped.items():
        print(f"SKIPPED: {name}: {why}", flush=True)
    possible = [injury for injury in chosen if injury.fault.name not in skipped]
    devices = [(device["alpha_s"], device["beta_s"]) for device in DEVICES.values()] * NODES
    report, chance = Report(asked.out, chosen, skipped), random.Random(asked.seed)
    rate = OVERLOAD * capacity(devices, SLO_S)
    with Traffic(rig.port, rig.grpc_port, rate, asked.seed) as traffic, Memory(rig) as watched:
        began = time.monotonic()
        for number, injury in enumerate(agenda(possible, asked.seed), 1):
            report.add(phase_of(injury, rig, traffic, chance))
            report.write(watched.lives)
            longest = asked.minutes if number >= len(possible) else max(asked.minutes, LONGEST_MIN)
            # What comes after a service that did not become whole would be blamed for it.
            if time.monotonic() > began + 60 * longest or report.phases[-1].whole_s is None:
                break
    report.end(watched.lives, watched.began)
    return report.broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0, help="go on for so long; each fault comes once anyway")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="faults whose names hold one of these words, by commas")
    parser.add_argument("--out", type=Path, default=Path("reports/soak"))
    asked = parser.parse_args()
    if sys.platform != "linux":
        print("SKIPPED: each node has a loopback address of its own, which only Linux gives")
        return 0
    rig = Rig()
    try:
        rig.start()
        return int(bool(soak(rig, asked)))
    finally:
        rig.stop()


if __name__ == "__main__":
    sys.exit(main())
