"""Runs planned steps on a running service: `POST /calibration/steps`, with a trial's secret."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from calibration.generation.step_series import Seconds
from calibration.load import Address, ClientConnection, HttpReply, request_bytes
from calibration.measure.trials import GRANT_ARRIVES_S
from calibration.service.application import CalibrationFailed
from deployments.admission.trial import HEADER
from deployments.generation.planned_steps import PlannedStep

_TIMES = 3  # timed runs of each step, after one warm-up run
_ASK_S = 120.0  # running answers end first, and a long step runs several times
_AGAIN_S = 0.2
_BUSY_S = 60.0  # how long a replica may answer that it is busy


@dataclass(slots=True)
class StepTrials:
    """Steps on the replicas of `pool`. Serve chooses a replica each time."""

    address: Address
    headers: Sequence[tuple[str, str]]  # of every request, besides the trial's
    secret: str
    pool: str
    replicas: set[str] = field(default_factory=set)  # those that have answered
    _connection: ClientConnection | None = None

    async def ask(self, step: PlannedStep) -> tuple[Seconds, Seconds] | None:
        """The seconds of each run, and the host's; None if the step does not fit. Raises CalibrationFailed."""
        body = {"pool": self.pool, "times": _TIMES, "loads": [step._asdict()]}
        headers = [*self.headers, (HEADER, self.secret)]
        request = request_bytes(body, f"{self.address.prefix}/calibration/steps", headers, self.address.netloc)
        found = (await self._answered(request)).json()
        self.replicas.add(str(found["replica"]))
        (seconds,), (host_seconds,) = found["seconds"], found["host_seconds"]
        return None if seconds is None else (tuple(seconds), tuple(host_seconds))

    async def _answered(self, request: bytes) -> HttpReply:
        """Retries, because the grant may not have reached the Router yet, or the replica may be busy."""
        began = time.monotonic()
        while True:
            reply = await self._sent(request)
            waits_s = {403: GRANT_ARRIVES_S, 503: _BUSY_S}.get(reply.status, 0.0)
            if reply.status == 200:
                return reply
            if time.monotonic() - began > waits_s:
                raise CalibrationFailed(f"the {self.pool} pool refused a planned step: {reply.problem}")
            await asyncio.sleep(_AGAIN_S)

    async def _sent(self, request: bytes) -> HttpReply:
        try:
            if self._connection is None:
                self._connection = await ClientConnection.open(self.address)
            return await self._connection.ask(request, _ASK_S)
        except (OSError, EOFError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_ASK_S:.0f} s"
            raise CalibrationFailed(f"a planned step on the {self.pool} pool was not answered: {reason}") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.hang_up()
