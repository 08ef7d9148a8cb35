"""`Routes` as a request router of Ray Serve."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .routing import Routes, Wish


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Routes calls that bring `wish`; others go where there is least to do."""

    def initialize_state(self, **given: Any) -> None:
        """`room` and `slack` as of `Routes`."""
        self._routes = Routes(given["room"], given["slack"])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Each rank is one replica, so that the order is that of `Routes`."""
        by_name = {r.replica_id.unique_id: r for r in candidate_replicas}
        loads = {
            name: self.replica_queue_len_cache.get(r.replica_id) or 0 for name, r in by_name.items()
        }
        wish = _wish(pending_request)
        ranked = self._routes.choose(wish, loads)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            wish.tried.append(ranked[0])
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica has taken a request."""
        wish = _wish(pending_request)
        wish.tried.append(replica_id.unique_id)
        self._routes.went(wish, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are there now."""
        super().update_replicas(replicas)
        self._routes.keep(r.replica_id.unique_id for r in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """It is gone, and what it had read."""
        super().on_replica_actor_died(replica_id)
        self._routes.keep(r.unique_id for r in self.curr_replicas)


def _wish(pending: PendingRequest | None) -> Wish:
    wish = None if pending is None else pending.kwargs.get("wish")
    return wish if isinstance(wish, Wish) else Wish()
