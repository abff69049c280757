"""Tells a Router which replicas of a pool are alive. Serve reports them to its request router, an extension point.

Queries do not go through Serve's handle (see `serving.connections`). Only a first call is routed here, after which the
handle follows its deployment. Serve pickles this module by value into the Router's process, so shared state lives in
`membership`.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.serve_adapter import membership


class ReplicaRouter(RequestRouter):
    """Publishes the live replicas whenever they change."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002 - Serve's signature
    ) -> list[list[RunningReplica]]:
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
