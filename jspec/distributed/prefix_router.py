"""Ray Serve's router of the replicas: by prefix within a bound, else the less loaded of two."""

from __future__ import annotations

import random
from typing import Any

from jspec.distributed.prefix_routes import PrefixRoutes
from jspec.messages.request import Request

try:
    from ray.serve.request_router import RequestRouter
except ImportError:  # the module loads without Ray; only Ray uses the class, by its name
    RequestRouter = object


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    def initialize_state(self, *, most_ahead: int, most_blocks: int) -> None:
        self._routes = PrefixRoutes(most_ahead=most_ahead, most_blocks=most_blocks)

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        self._routes.keep({each.replica_id.unique_id for each in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return ranks of replicas; within a rank, Serve takes the one with the fewest requests."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        request = _request_of(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before the next call
        if request is None:
            return [two]
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        known = self.replica_queue_len_cache
        loads = {name: known.get(each.replica_id) or 0 for name, each in by_name.items()}
        name = self._routes.choose(
            _ids(request), loads, namespace=(request.extra_key, request.lora)
        )
        return [two] if name is None else [[by_name[name]], two]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        del result
        request = _request_of(pending_request)
        if request is not None:
            self._routes.note(
                _ids(request), replica_id.unique_id, namespace=(request.extra_key, request.lora)
            )


def _request_of(pending: Any) -> Request | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, Request) else None


def _ids(request: Request) -> tuple[int, ...]:
    return (*request.prompt_ids, *request.former_ids)
