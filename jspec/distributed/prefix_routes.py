"""A memory of which replicas have seen which prefix, by hashes of whole blocks.

blocks of 64 ids, prompts of     A: b1 b2 b3     B: b1 b2 b4
replica 1 has run A              b1, b2, b3 → 1
B                                its longest known prefix, b1 b2, is replica 1's
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

BLOCK = 64  # ids


class PrefixRoutes:
    """The replicas of each known prefix, in at most `most_blocks` recently used blocks."""

    def __init__(self, *, most_ahead: int, most_blocks: int) -> None:
        # most_ahead: requests that a replica with the prefix may have more than the least loaded.
        self._most_ahead, self._most_blocks = most_ahead, most_blocks
        self._replicas_of: OrderedDict[Hashable, set[str]] = OrderedDict()

    def choose(
        self, ids: Sequence[int], loads: Mapping[str, int], *, namespace: Hashable = None
    ) -> str | None:
        """Return the least loaded replica with the longest known prefix.

        Return None if no live replica has one, or if that replica is too loaded. loads: requests of
        each live replica.
        """
        for key in reversed([*_keys(ids, namespace)]):
            found = self._replicas_of.get(key, set()) & loads.keys()
            if found:
                best = min(found, key=lambda name: (loads[name], name))
                return best if loads[best] <= min(loads.values()) + self._most_ahead else None
        return None

    def note(self, ids: Sequence[int], replica: str, *, namespace: Hashable = None) -> None:
        for key in _keys(ids, namespace):
            self._replicas_of.setdefault(key, set()).add(replica)
            self._replicas_of.move_to_end(key)
        while len(self._replicas_of) > self._most_blocks:
            self._replicas_of.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        for key, found in list(self._replicas_of.items()):
            found.intersection_update(replicas)
            if not found:
                del self._replicas_of[key]


def _keys(ids: Sequence[int], namespace: Hashable) -> Iterator[Hashable]:
    """Yield a hash of each prefix that ends with a whole block."""
    key = hash(namespace)
    for begin in range(0, len(ids) - BLOCK + 1, BLOCK):
        key = hash((key, tuple(ids[begin : begin + BLOCK])))
        yield key
