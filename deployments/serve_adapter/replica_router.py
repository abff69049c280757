"""Tells a Router which replicas of a pool are alive. Serve reports them to its request router, an extension point.

Queries do not go through Serve's handle (see `serving.connections`). Only two kinds of call are routed here: a first
one, after which the handle follows its deployment, and those of a calibration, each to the replica that it names. Serve
pickles this module by value into the process that has the handle, so shared state lives in `membership`.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.serve_adapter import membership


class ReplicaRouter(RequestRouter):
    """Publishes the live replicas whenever they change."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that a call names in its argument `replica`, if it lives; else all."""
        wanted = None if pending_request is None else pending_request.kwargs.get("replica")
        named = [one for one in candidate_replicas if one.replica_id.unique_id == wanted]
        if named:
            return [named]
        return [list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish(died=replica_id.unique_id)

    def _publish(self, died: str | None = None) -> None:
        members = {replica.replica_id.unique_id: replica.replica_metadata for replica in self.curr_replicas.values()}
        membership.publish(self._deployment_id.name, members, died)
