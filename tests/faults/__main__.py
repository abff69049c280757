"""`make soak MINUTES=60`: load at 1.2 times capacity while one fault after another is done to a real service, each with
quiet after it. Writes `report.md` and `memory.png`; exits 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
from conftest import ROOT
from faults import memory, verdict
from faults.agenda import agenda, capacity
from faults.injuries import INJURIES, Injury
from faults.memory import Life
from faults.rig import DEVICES, NODES, SLO_S, Rig
from faults.traffic import Traffic
from faults.verdict import Phase

OVERLOAD = 1.2
LEAD_S, TAIL_S = 1.5, 1.0  # of load before a fault, and once the service is whole again
WHOLE_S = 120.0  # so long a service may take to be whole again
DRAINED_S, STILL_S = 100.0, 20.0  # for what is in flight to end; for the metrics to say so
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
    with injury.do(rig, traffic, chance):
        time.sleep(injury.hold_s)
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


def soak(rig: Rig, minutes: float, seed: int, only: str | None, out: Path) -> list[Phase]:
    chosen = [injury for injury in INJURIES if not only or any(word in injury.fault.name for word in only.split(","))]
    skipped = {injury.fault.name: why for injury in chosen if (why := injury.cannot(rig))}
    for name, why in skipped.items():
        print(f"SKIPPED: {name}: {why}", flush=True)
    possible = [injury for injury in chosen if injury.fault.name not in skipped]
    rate = OVERLOAD * capacity([(device["alpha_s"], device["beta_s"]) for device in DEVICES.values()] * NODES, SLO_S)
    phases: list[Phase] = []
    chance, ends = random.Random(seed), time.monotonic() + 60 * minutes
    with Traffic(rig.port, rig.grpc_port, rate, seed) as traffic, Memory(rig) as watched:
        for injury in agenda(possible, seed):
            if time.monotonic() > ends:
                break
            phase = phase_of(injury, rig, traffic, chance)
            phases.append(phase)
            row = dict(zip(verdict.HEAD, verdict.rows_of([phase])[0], strict=True))
            print(f"{time.monotonic() - watched.began:6.0f} s  {row}", flush=True)
            for problem in verdict.problems_of(phase):
                print(f"          BROKEN PROMISE: {problem}", flush=True)
            if phase.whole_s is None:
                break  # what comes after would be blamed for it
        faults_at = {phase.injected_at - watched.began: phase.fault.name for phase in phases}
    write(out, phases, watched.lives, faults_at, [injury.fault.name for injury in chosen], skipped)
    return phases


def write(out: Path, phases, lives, faults_at, names, skipped) -> None:
    done = {phase.fault.name for phase in phases}
    missed = [name for name in names if name not in done and name not in skipped]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [
        f"{verdict.summary(phases)}; commit {commit}, {os.cpu_count()} cores, {platform.processor()}\n",
        verdict.markdown(verdict.HEAD, verdict.rows_of(phases)),
        *(f"- skipped: {name}: {why}" for name, why in skipped.items()),
        *(f"- not reached in this time: {name}" for name in missed),
        *(f"- broken promise: {problem}" for phase in phases for problem in verdict.problems_of(phase)),
        *(f"- broken promise: {problem}" for problem in memory.growing(lives)),
        "",
        verdict.markdown(memory.HEAD, memory.rows_of(lives)),
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text("\n".join(lines))
    with (out / "requests.jsonl").open("w") as file:
        for phase in phases:
            for ended in phase.ended:
                file.write(json.dumps({"fault": phase.fault.name, "at": phase.injected_at, **asdict(ended)}) + "\n")
    if lives:
        memory.picture(lives, faults_at).savefig(out / "memory.png")
    print("\n".join(lines), f"\nwritten: {out}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="faults whose names hold one of these words, by commas")
    parser.add_argument("--out", type=Path, default=Path("soak-report"))
    asked = parser.parse_args()
    rig = Rig()
    try:
        rig.start()
        phases = soak(rig, asked.minutes, asked.seed, asked.only, asked.out)
    finally:
        rig.stop()
    return int("broken promise" in (asked.out / "report.md").read_text() or not phases)


if __name__ == "__main__":
    sys.exit(main())
