"""Snapshots of rows' recurrent states at page ends, for rows with a common prefix.

A row can start after cached pages only where the state at their end was copied to a snapshot slot.
A prefill step first restores the states of admitted rows, then runs, then saves states. So chunks
are cut to end

    at the last page end of the prompt after which a text with this prefix could start
    otherwise at the last multiple of the stride that the chunk reaches

    worked example: page_size 4, stride 2 pages, a prompt of 30, chunks of 12
    chunks 0..7 and 8..15  saved at 8 and 16
    chunk 16..27           saved at 28, the last page end
    chunk 28..29           samples the first token

A state is saved when its step is planned and can be found once the pages before it are in the tree.
Slots that are needed neither at the end of a text nor where texts diverged are reused first, then
the least recently saved or restored one. Steps run in the order of their dispatch, so a slot may be
reused while a step that restores it is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from jspec.config.limits import SnapshotLimits
from jspec.errors import InvariantError
from jspec.scheduler.pages.prefix_cache import Node


class SnapshotSpace:
    """Snapshot slots 1..count. index: the space id."""

    def __init__(self, limits: SnapshotLimits, *, index: int, page_size: int) -> None:
        self.index = index
        self.num_snapshots = limits.count
        self.version = 0  # changes with each snapshot attached or detached
        self._page_size = page_size
        self._stride = limits.stride * page_size
        self._free = list(range(limits.count, 0, -1))  # a stack
        self._attached: dict[int, tuple[Node, int]] = {}  # least recently used first

    @property
    def num_cached(self) -> int:
        return len(self._attached)

    def num_leaked(self, num_pending: int) -> int:
        return self.num_snapshots - len(self._free) - len(self._attached) - num_pending

    # Rows.

    def chunk_end(self, start: int, end: int, *, last: int) -> int:
        """Return the end of a chunk that could reach `end`. last: the last useful page end."""
        if start < last <= end:
            return last
        at_stride = end // self._stride * self._stride
        return at_stride if start < at_stride < last else end

    def saves_at(self, end: int, *, last: int) -> bool:
        return 0 < end <= last and (end == last or end % self._stride == 0)

    def allocate(self) -> int | None:
        if not self._free and self._attached:
            others = (s for s, (node, _) in self._attached.items() if not self._is_sought(node))
            self._detach(next(others, next(iter(self._attached))))
        return self._free.pop() if self._free else None

    def restore(self, node: Node) -> int:
        snapshot = node.records[self.index]
        if not snapshot:
            raise InvariantError(f"a row starts after {node.depth} pages; expected a snapshot")
        self._attached[snapshot] = self._attached.pop(snapshot)
        return snapshot

    def free(self, snapshot: int) -> None:
        self._free.append(snapshot)

    def publish(self, snapshot: int, node: Node, *, writer: int) -> None:
        """Attach an allocated slot to a node, or free it if the node already has one. writer: the
        first step that may restore it."""
        if node.records[self.index]:
            self.free(snapshot)
            return
        node.records[self.index] = snapshot
        self._attached[snapshot] = node, writer
        self.version += 1

    # The prefix tree.

    def last_start(self, path: Sequence[Node], depth: int) -> int:
        while depth and not path[depth - 1].records[self.index]:
            depth -= 1
        return depth

    def seek(self, node: Node) -> None:
        for each in node.path():
            if each.records[self.index]:
                each.sought |= 1 << self.index
                return

    def _is_sought(self, node: Node) -> bool:
        return bool(node.sought >> self.index & 1)

    def forget(self, node: Node) -> None:
        if node.records[self.index]:
            self._detach(node.records[self.index])

    def withdraw(self, step: int) -> None:
        for snapshot in [s for s, (_, writer) in self._attached.items() if writer >= step]:
            self._detach(snapshot)

    def _detach(self, snapshot: int) -> None:
        node, _ = self._attached.pop(snapshot)
        node.records[self.index] = 0
        self._free.append(snapshot)
        self.version += 1
        node.prune()
