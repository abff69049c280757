"""How a batch reaches the replica it was made for, and how the Router learns which replicas live.

Serve's handle picks a replica by itself (power of two choices). A depth is a promise of one device, so the batcher
picks, and this request router (Serve's own extension point) sends the call where its first argument says. Serve tells
the same object whenever replicas come and go, which makes it the Router's source of membership too.

Serve pickles this module by value into the Router's process: state that both share lives in `membership`.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments import membership


class ReplicaRouter(RequestRouter):
    """Sends each call to the replica that its first argument names."""

    @property
    def supports_rejection_protocol(self) -> bool:
        return False  # the queue manager has admitted already; a replica never refuses

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.args[0] if pending_request is not None and pending_request.args else None
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        # A replica that has gone: any other will do, it answers ReplicaLost.
        return [named or list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish(died=replica_id.unique_id)

    def _publish(self, died: str | None = None) -> None:
        members = {replica.replica_id.unique_id: replica.replica_metadata for replica in self.curr_replicas.values()}
        membership.publish(self._deployment_id.name, members, died)
