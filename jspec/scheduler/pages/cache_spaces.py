"""The cache spaces of an engine and the prefix cache over them.

A row starts with the cached pages of its prefix, which it shares and never writes. It caches its
own pages

    during prefill, when the step that completes them is dispatched: any later step may read them,
        because the device runs steps in order
    before a page leaves its window
    at its end, however it ends, up to what is known to be committed

If another row is computing a new request's prefix, the request waits for it. So n samples of a
prompt, or a burst, compute a long common prefix once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from jspec.config.limits import ServeLimits
from jspec.messages.plan import PageGrant, PrefillChunk, SnapshotCopy
from jspec.messages.request import DEFAULT_VERSION
from jspec.scheduler import policy
from jspec.scheduler.pages.page_space import PageSpace, RowPages
from jspec.scheduler.pages.prefix_cache import Node, PrefixCache, RecordSpace
from jspec.scheduler.pages.snapshot_space import SnapshotSpace
from jspec.scheduler.sequence import Sequence, Tenancy

# Waiting must save at least 1 / WORTH_WAITING of the tokens to compute.
WORTH_WAITING = 4


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached prefix of a text."""

    path: Ordered[Node] = ()  # the row may start after its last page
    num_in_use: int = 0  # pages of the full space that rows use already
    reached: Node | None = None  # the last node in the tree; it may lack pages

    @property
    def num_pages(self) -> int:
        return len(self.path)


class CacheSpaces:
    """All cache spaces by id: 0 is the full space, i is that of limits.windows[i - 1]; snapshots
    have the last. Without limits.prefix_cache no pages are cached."""

    def __init__(self, limits: ServeLimits, *, weight_version: str = DEFAULT_VERSION) -> None:
        self._limits = limits
        sizes: list[tuple[int | None, int]] = [(None, limits.pool.num_pages)]
        sizes += [(space.window, space.num_pages) for space in limits.pool.windows]
        self.spaces = tuple(
            PageSpace(
                limits,
                num_pages,
                index=i,
                keep=keep,
                on_evict=self._forget if keep is None else None,
            )
            for i, (keep, num_pages) in enumerate(sizes)
        )
        of_trees: list[RecordSpace] = [*self.spaces]
        self.snapshots: SnapshotSpace | None = None
        if limits.pool.snapshots is not None:
            self.snapshots = SnapshotSpace(
                limits.pool.snapshots, index=len(self.spaces), page_size=limits.pool.page_size
            )
            of_trees.append(self.snapshots)
        self._cache = PrefixCache(
            of_trees, page_size=limits.pool.page_size, lookahead=limits.draft_shape.tokens_ahead
        )
        self._is_caching = limits.scheduling.prefix_cache
        self._found: tuple[tuple[int, int, int], Hit] | None = None
        self._weight_version = weight_version
        self._num_weights = 0

    @property
    def weight_version(self) -> str:
        return self._weight_version

    @property
    def num_free(self) -> int:
        """Free pages of the full space; the pages of other spaces are promised."""
        return self.spaces[0].num_free

    def num_leaked(self, tenancies: Iterable[Tenancy]) -> int:
        """Return the uses of pages and snapshots without a row: 0 unless there is a bug."""
        rows, num_pending = [], 0
        for tenancy in tenancies:
            rows.append(tenancy.pages)
            num_pending += len(tenancy.pending_snapshots)
        found = 0 if self.snapshots is None else self.snapshots.num_leaked(num_pending)
        return found + sum(
            space.num_leaked(pages[i] for pages in rows) for i, space in enumerate(self.spaces)
        )

    def _forget(self, node: Node) -> None:
        self._cache.forget(node)

    # Admission.

    def find(self, sequence: Sequence) -> Hit:
        if not self._is_caching:
            return Hit()
        # Keyed by arrival: a later request may reuse the request id.
        asked = sequence.arrival, sequence.num_tokens, self._cache.version
        if self._found is None or self._found[0] != asked:
            path = self._cache.match(self._namespace(sequence), sequence.sharable_ids)
            start = self._cache.last_start(path)
            self._found = asked, Hit(path[:start], reached=path[-1] if path else None)
        hit = self._found[1]
        return Hit(hit.path, self.spaces[0].num_in_use(hit.path), hit.reached)

    def may_admit(self, newcomer: Sequence, hit: Hit, running: Ordered[Sequence]) -> bool:
        num_free, last = self.num_free + hit.num_in_use, newcomer.last_committed
        return policy.may_admit(self._limits, newcomer, running, num_free_pages=num_free) and all(
            space.may_promise(last) for space in self.spaces
        )

    def waits(self, sequence: Sequence, hit: Hit, writers: Iterable[Tenancy]) -> bool:
        """Return whether to wait for a row of `writers` that will soon cache much of the prefix."""
        if not self._is_caching:
            return False
        page_size, namespace = self._limits.pool.page_size, self._namespace(sequence)
        fill_ids, have = sequence.sharable_ids, hit.num_pages
        most = (len(fill_ids) - 1) // page_size
        for writer in writers:
            if writer.namespace != namespace:
                continue
            common = self._common_pages(fill_ids, writer.fill_ids, low=have, high=most)
            gain, rest = (common - have) * page_size, len(fill_ids) - have * page_size
            if gain > 0 and gain * WORTH_WAITING >= rest:
                return True
        return False

    def _common_pages(
        self, ids: tuple[int, ...], other: tuple[int, ...], *, low: int, high: int
    ) -> int:
        high = max(min(high, self._cache.num_full(min(len(ids), len(other)))), low)
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * self._limits.pool.page_size + self._limits.draft_shape.tokens_ahead
            if ids[:end] == other[:end]:
                low = middle
            else:
                high = middle - 1
        return low

    def admit(self, tenancy: Tenancy, hit: Hit, num_pages: int) -> list[PageGrant]:
        sequence = tenancy.sequence
        sequence.weight_version = self._weight_version
        last = sequence.last_committed
        tenancy.pages = tuple(
            space.admit(hit.path, last=last, end=num_pages) for space in self.spaces
        )
        tenancy.table.pages[tenancy.row.slot] = tenancy.pages[0].end
        if self._is_caching:
            tenancy.namespace = self._namespace(sequence)
            node = hit.path[-1] if hit.path else self._cache.root(tenancy.namespace)
            node.num_users += 1
            tenancy.last_cached = node
            for end in (node, hit.reached or node):
                self._cache.seek(end)
        tenancy.cached_len = tenancy.num_filled = hit.num_pages * self._limits.pool.page_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = tenancy.cached_len
        slot = tenancy.row.slot
        return [
            PageGrant(slot, row.first, tuple(row.pages), space=i)
            for i, row in enumerate(tenancy.pages)
            if row.pages
        ]

    # Growth, caching and release.

    def grow(self, tenancy: Tenancy, end: int) -> list[PageGrant]:
        grants, slot = [], tenancy.row.slot
        for i, (space, row) in enumerate(self._rows(tenancy)):
            begin = row.end
            if begin < end:
                grants.append(PageGrant(slot, begin, space.grow(row, end), space=i))
        tenancy.table.pages[slot] = tenancy.pages[0].end
        return grants

    def publish(self, tenancy: Tenancy, *, step: int) -> None:
        """Cache the pages that chunk `step` completes, and release those no longer seen."""
        self._publish(tenancy, step=step)
        self._trim(tenancy)

    def trim(self, tenancy: Tenancy, *, step: int) -> None:
        """Cache the output, then release the pages that no later query sees."""
        length = self._seen_len(tenancy)
        if any(space.num_unseen(row, length) for space, row in self._rows(tenancy)):
            self._publish(tenancy, step=step)
            self._trim(tenancy)

    def keep(self, tenancy: Tenancy, *, step: int) -> None:
        """Cache an ending row's pages, which it uses until `release`. step: last dispatched."""
        self._publish(tenancy, step=step, is_last=True)

    def _publish(self, tenancy: Tenancy, *, step: int, is_last: bool = False) -> None:
        before, known = tenancy.last_cached, tenancy.drafted_len
        if before is None or not self._is_current(tenancy):
            return
        begin = before.depth * self._limits.pool.page_size
        ids = tenancy.ids_between(begin, known)
        last = self._cache.extend(before, ids, known=known, begin=begin)
        since = 0 if is_last else before.depth
        for space, row in self._rows(tenancy):
            space.publish(row, last, since=since, writer=step)
        self._publish_snapshots(tenancy, last, step=step)
        before.num_users -= 1
        last.num_users += 1
        tenancy.last_cached = last
        if is_last or known == len(tenancy.fill_ids):
            self._cache.seek(last)

    def _trim(self, tenancy: Tenancy) -> None:
        length = self._seen_len(tenancy)
        for space, row in self._rows(tenancy):
            space.trim(row, length)

    def _seen_len(self, tenancy: Tenancy) -> int:
        """Return a lower bound of all later queries, including those of a pending draft prefill."""
        return tenancy.drafted_len - self._limits.draft_shape.lag

    def release(self, tenancy: Tenancy) -> None:
        for space, row in self._rows(tenancy):
            space.release(row)
        if self.snapshots is not None:
            for snapshot in tenancy.pending_snapshots.values():
                self.snapshots.free(snapshot)
            tenancy.pending_snapshots.clear()
        if tenancy.last_cached is not None:
            tenancy.last_cached.num_users -= 1
            tenancy.last_cached.prune()

    # Snapshots of states.

    def chunk_end(self, tenancy: Tenancy, end: int) -> int:
        if self.snapshots is None or not self._is_caching:
            return end
        last = self._last_start(tenancy)
        return self.snapshots.chunk_end(tenancy.num_filled, end, last=last)

    def restore(self, tenancy: Tenancy) -> list[SnapshotCopy]:
        """Return the copy that sets the state of a new row with a cached prefix."""
        node = tenancy.last_cached
        if self.snapshots is None or node is None or not node.depth:
            return []
        return [SnapshotCopy(tenancy.row.slot, self.snapshots.restore(node))]

    def save(self, tenancy: Tenancy, chunk: PrefillChunk) -> list[SnapshotCopy]:
        """Return the copy of the row's state after a chunk, if it is wanted."""
        end, size = chunk.start + len(chunk.token_ids), self._limits.pool.page_size
        if self.snapshots is None or tenancy.last_cached is None:
            return []
        if not self.snapshots.saves_at(end, last=self._last_start(tenancy)):
            return []
        snapshot = self.snapshots.allocate()
        if snapshot is None:
            return []
        tenancy.pending_snapshots[end // size] = snapshot
        return [SnapshotCopy(tenancy.row.slot, snapshot)]

    def _last_start(self, tenancy: Tenancy) -> int:
        size, length = self._limits.pool.page_size, len(tenancy.fill_ids)
        return min(self._cache.num_full(length), (length - 1) // size) * size

    def _publish_snapshots(self, tenancy: Tenancy, last: Node, *, step: int) -> None:
        pending = tenancy.pending_snapshots
        if self.snapshots is None or not pending:
            return
        for node in last.path():
            if node.depth < min(pending, default=last.depth + 1):
                break
            if node.depth in pending:
                self.snapshots.publish(pending.pop(node.depth), node, writer=step)

    def withdraw(self, step: int) -> None:
        self._cache.withdraw(step)

    def set_weight_version(self, version: str, *, renames: bool = False) -> None:
        """Search and add only pages of the new weights. renames: only the name changes."""
        self._weight_version, self._found = version, None
        self._num_weights += not renames

    def flush(self) -> None:
        """Empty the cache. Pages of ended rows are free once their last step is read."""
        self._cache.withdraw(0)

    def _rows(self, tenancy: Tenancy) -> Iterator[tuple[PageSpace, RowPages]]:
        return zip(self.spaces, tenancy.pages, strict=True)

    def _namespace(self, sequence: Sequence) -> Hashable:
        request = sequence.request
        return self._num_weights, request.extra_key, request.lora

    def _is_current(self, tenancy: Tenancy) -> bool:
        return tenancy.namespace == self._namespace(tenancy.sequence)
