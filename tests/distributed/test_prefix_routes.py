"""Routing by the beginning of a prompt, within a bound on the load."""

from __future__ import annotations

from jspec.distributed.prefix_routes import BLOCK, PrefixRoutes

SYSTEM = tuple(range(2 * BLOCK))


def test_the_longest_known_beginning_decides_within_the_load() -> None:
    routes = PrefixRoutes(most_ahead=2, most_blocks=100)
    loads = {"a": 0, "b": 0, "c": 0}
    assert routes.choose(SYSTEM, loads) is None
    routes.note(SYSTEM, "a")
    routes.note((*SYSTEM, *[7] * BLOCK), "b")
    assert routes.choose((*SYSTEM, *[1] * BLOCK), loads) == "a"  # both have it
    assert routes.choose((*SYSTEM, *[1] * BLOCK), {**loads, "a": 1}) == "b"
    assert routes.choose((*SYSTEM, *[7] * BLOCK, 5), loads) == "b"
    assert routes.choose(SYSTEM[: BLOCK - 1], loads) is None  # less than a block
    assert routes.choose(SYSTEM, loads, namespace="another extra_key") is None
    assert routes.choose(SYSTEM, {"a": 2, "b": 3, "c": 0}) == "a"
    assert routes.choose(SYSTEM, {"a": 3, "b": 3, "c": 0}) is None
    assert routes.choose((*SYSTEM, *[7] * BLOCK), {"a": 9, "c": 8}) == "a"  # b is gone
    routes.keep({"b", "c"})
    assert routes.choose(SYSTEM, loads) == "b"
    routes.keep({"c"})
    assert routes.choose(SYSTEM, loads) is None
    assert routes.choose(SYSTEM, {}) is None


def test_it_forgets_the_least_recently_used() -> None:
    routes, loads = PrefixRoutes(most_ahead=2, most_blocks=2), {"a": 0}
    for first in (1, 2, 1, 3):
        routes.note([first] * BLOCK, "a")
    assert [routes.choose([first] * BLOCK, loads) for first in (1, 2, 3)] == ["a", None, "a"]
