"""Pages of the full space: lent to rows, cached after use, shared by texts with a common prefix.

A row starts with the cached pages of its text, which it shares and never writes: its first write is
at the first token that it computes, on a page of its own. It caches its pages

    during prefill, when the step that completes them is dispatched: any later step may read them,
        because the device runs steps in order
    at its end, however it ends, up to what is known to be committed; the rest is freed

Cached pages that no row uses count as free: they are evicted on demand.

Pages of the window spaces (`window_pages.py`) are found through those with the same tokens. There a
row releases pages while it runs: its output is cached before the first such page is released.

A new request whose prefix is being computed by another row waits for that row: n samples of a
prompt, or a burst, compute a long common prefix once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import islice

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError
from jspec.messages.plan import PageGrant, RowRef
from jspec.messages.request import DEFAULT_VERSION
from jspec.scheduler.pages.cached_page import CachedPage
from jspec.scheduler.pages.page_pool import PagePool
from jspec.scheduler.pages.prefix_cache import PrefixCache
from jspec.scheduler.pages.window_pages import WindowPages
from jspec.scheduler.sequence import Sequence, Tenancy

# Waiting must save at least 1 / WORTH_WAITING of the tokens to compute.
WORTH_WAITING = 4


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached prefix of a text.

    last: its last page, or None.
    num_in_use: its pages that rows use, which need no free pages.
    reached: the last page that the text has in the tree; `last` comes before it if a window space
        lacks pages.
    """

    last: CachedPage | None = None
    num_in_use: int = 0
    reached: CachedPage | None = None

    @property
    def num_pages(self) -> int:
        return 0 if self.last is None else self.last.depth


class FullPages:
    """The pool of the full space and the prefix cache, to which it also attaches window pages.

    Without limits.prefix_cache no pages are cached.
    """

    def __init__(
        self, limits: ServeLimits, windows: WindowPages, *, weight_version: str = DEFAULT_VERSION
    ) -> None:
        self._limits = limits
        self._windows = windows
        self._pool = PagePool(limits.num_pages)
        self._cache = PrefixCache(
            page_size=limits.page_size, lookahead=limits.spec.tokens_ahead, windows=windows.pools
        )
        self._is_caching = limits.prefix_cache
        self._found: tuple[tuple[int, int, int], Hit] | None = None
        self._weight_version = weight_version
        self._num_weights = 0
        self._doubles: dict[RowRef, Tenancy] = {}  # rows with duplicates of cached pages they use

    @property
    def weight_version(self) -> str:
        return self._weight_version

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be lent: free ones, and cached ones that no row uses."""
        return self._pool.num_free + self._cache.num_evictable

    @property
    def num_cached(self) -> int:
        return self._cache.num_pages

    def num_leaked(self, tenancies: Iterable[Tenancy]) -> int:
        """Return the number of lent pages that no row and no cache accounts for; always 0."""
        held = sum(len(tenancy.page_ids) - tenancy.num_cached for tenancy in tenancies)
        return self._pool.num_leaked(held + self._cache.num_pages)

    # Admission.

    def find(self, sequence: Sequence) -> Hit:
        """Return the cached prefix of a sequence as of now."""
        if not self._is_caching:
            return Hit()
        # Keyed by arrival: a later request may reuse the request id.
        asked = sequence.arrival, sequence.num_tokens, self._cache.version
        if self._found is None or self._found[0] != asked:
            reached = self._cache.match(self._namespace(sequence), sequence.sharable_ids)
            last = self._cache.usable(reached) if reached and self._limits.windows else reached
            self._found = asked, Hit(last, reached=reached)
        last, reached = self._found[1].last, self._found[1].reached
        in_use = 0 if last is None else sum(node.num_users > 0 for node in last.path())
        return Hit(last, in_use, reached)

    def waits(self, sequence: Sequence, hit: Hit, writers: Iterable[Tenancy]) -> bool:
        """Return whether to wait for another row that will soon cache much more of the prefix.

        writers: rows whose prefill is not fully dispatched, including those of the current plan.
        """
        if not self._is_caching:
            return False
        page_size, namespace = self._limits.page_size, self._namespace(sequence)
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
        """Return how many pages the texts share, between `low` and `high`; binary search."""
        high = max(min(high, self._cache.num_full(min(len(ids), len(other)))), low)
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * self._limits.page_size + self._limits.spec.tokens_ahead
            if ids[:end] == other[:end]:
                low = middle
            else:
                high = middle - 1
        return low

    def admit(self, tenancy: Tenancy, hit: Hit, num_pages: int) -> None:
        """Give a new row its first num_pages pages: the cached ones, then its own."""
        tenancy.sequence.weight_version = self._weight_version
        if self._is_caching:
            tenancy.namespace = self._namespace(tenancy.sequence)
            last = hit.last or self._cache.root(tenancy.namespace)
            self._cache.lock(last)
            tenancy.last_cached = last
            tenancy.page_ids.extend(last.pages)
            tenancy.num_cached = last.depth
            if self._limits.windows:
                for node in (last, hit.reached or last):
                    self._cache.seek(node)
        tenancy.cached_len = tenancy.num_filled = hit.num_pages * self._limits.page_size
        if tenancy.sequence.cached_tokens is None:
            tenancy.sequence.cached_tokens = tenancy.cached_len
        tenancy.page_ids.extend(self.allocate(num_pages - hit.num_pages))
        self._windows.admit(tenancy, hit.last)

    def grow(self, tenancy: Tenancy, num_pages: int) -> list[PageGrant]:
        """Lend a row num_pages more pages. Raises InvariantError for more than is allowed."""
        first, limits = len(tenancy.page_ids), self._limits
        if num_pages > limits.grants_per_row or first + num_pages > limits.pages_per_row:
            raise InvariantError(
                f"row {tenancy.row} gets {num_pages} pages after {first}; expected at most "
                f"{limits.grants_per_row} at once and {limits.pages_per_row} in all"
            )
        pages = self.allocate(num_pages)
        tenancy.page_ids.extend(pages)
        return [PageGrant(tenancy.row.slot, first + i, page) for i, page in enumerate(pages)]

    def allocate(self, num_pages: int) -> tuple[int, ...]:
        """Lend pages, evicting if necessary. Raises InvariantError for more than num_free."""
        missing = num_pages - self._pool.num_free
        if missing > 0:
            self._pool.release(self._cache.evict(min(missing, self._cache.num_evictable)))
        return self._pool.allocate(num_pages)

    # Caching, growth and release.

    def publish(self, tenancy: Tenancy, *, step: int) -> None:
        """Cache the pages that the row's chunks complete, up to the step that is dispatched now."""
        self._publish(tenancy, tenancy.fill_ids, known=tenancy.num_filled, step=step)

    def trim(self, tenancy: Tenancy, *, step: int) -> None:
        """Release window pages of a row that has emitted (`WindowPages.trim`).

        Its output is cached first, so that these pages can be found. step: the last one dispatched.
        """
        if not self._windows.may_trim(tenancy):
            return
        last = tenancy.last_cached
        if last is not None:
            begin, known = last.depth * self._limits.page_size, tenancy.drafted_len
            ids = tenancy.ids_from(begin)
            self._publish(tenancy, ids, known=known, step=step, begin=begin)
        self._windows.trim(tenancy)

    def _publish(
        self, tenancy: Tenancy, ids: tuple[int, ...], *, known: int, step: int, begin: int = 0
    ) -> None:
        """Cache the first `known` tokens of a row that goes on. ids: its text from `begin` on.

        If window pages are released it continues after another row's page with the same text;
        otherwise pages that leave the window later could not be found. The row uses both pages as
        long as that other row exists (`_hold`).
        """
        before = tenancy.last_cached
        if before is None or not self._is_current(tenancy):
            return
        beside = bool(self._limits.windows)
        last = self._cache.extend(
            before, ids, tenancy.page_ids, known=known, writer=step, beside=beside, begin=begin
        )
        self._hold(tenancy, last, step=step)
        if self._limits.windows:
            held = self._windows.held(tenancy)
            reached = self._cache.attach(last, ids, held, known=known, writer=step, begin=begin)
            if known == len(tenancy.fill_ids):
                self._cache.seek(reached)

    def keep(self, tenancy: Tenancy, *, step: int) -> None:
        """Cache what an ending row has committed. It uses its pages until `release`.

        step: the last one dispatched; the committed tokens may depend on all steps up to it.
        """
        last = tenancy.last_cached
        if last is None or not self._is_current(tenancy):
            return
        ids, known = tenancy.sequence.fill_ids, tenancy.drafted_len
        last = self._cache.extend(
            last, ids, tenancy.page_ids, known=known, writer=step, beside=True
        )
        self._hold(tenancy, last, step=step)
        if self._limits.windows:
            held = self._windows.held(tenancy)
            self._cache.seek(self._cache.attach(last, ids, held, known=known, writer=step))

    def _hold(self, tenancy: Tenancy, last: CachedPage, *, step: int) -> None:
        """Make the row a user of the cached pages up to `last`.

        Where a page is not its own and no other row uses it, the row's own page replaces it, so
        that a row alone never occupies two.
        """
        before = tenancy.last_cached
        assert before is not None
        for node in islice(last.path(), last.depth - before.depth):
            if node.page == tenancy.page_ids[node.depth - 1]:
                tenancy.num_cached += 1
            else:
                node.num_doubles += 1
                self._doubles[tenancy.row] = tenancy
                if node.num_users == 1:
                    self._replace(node, tenancy, step=step)
        tenancy.last_cached = last

    def _replace(self, node: CachedPage, tenancy: Tenancy, *, step: int) -> None:
        own = tenancy.page_ids[node.depth - 1]
        self._pool.release((self._cache.replace(node, own, writer=step),))
        node.num_doubles -= 1
        tenancy.num_cached += 1

    def release(self, tenancy: Tenancy, *, step: int) -> None:
        """Free an ended row's own pages and unlock its cached ones.

        step: the last one dispatched. A page that only rows with a duplicate still use is replaced
        by one of their duplicates.
        """
        own = [page for page in tenancy.page_ids if page not in self._cache]
        if tenancy.last_cached is not None:
            doubled = self._undouble(tenancy) if self._doubles else ()
            own += self._cache.unlock(tenancy.last_cached)
            self._pass_on({n for n in doubled if n.num_users == n.num_doubles > 0}, step=step)
        self._pool.release(own)
        self._windows.release(tenancy)

    def _undouble(self, tenancy: Tenancy) -> list[CachedPage]:
        """Stop counting the row's duplicates; return the pages of its path that have any."""
        assert tenancy.last_cached is not None
        doubled = [node for node in tenancy.last_cached.path() if node.num_doubles]
        if self._doubles.pop(tenancy.row, None) is not None:
            for node in doubled:
                node.num_doubles -= node.page != tenancy.page_ids[node.depth - 1]
        return doubled

    def _pass_on(self, nodes: set[CachedPage], *, step: int) -> None:
        """Replace pages that are used only by rows with duplicates, each by one of these."""
        for tenancy in self._doubles.values() if nodes else ():
            assert tenancy.last_cached is not None
            for node in tenancy.last_cached.path():
                if node in nodes:
                    self._replace(node, tenancy, step=step)
                    nodes.remove(node)

    def withdraw(self, step: int) -> None:
        """Remove pages written by that step or later: it failed, and every row ends."""
        for tenancy in tuple(self._doubles.values()):
            self._undouble(tenancy)  # its duplicates may be lost: they must replace no page
        self._pool.release(self._cache.withdraw(step))

    def set_weight_version(self, version: str, *, renames: bool = False) -> None:
        """Search and add only pages of the new weights, even if former weights had the same name.

        renames: only the name changes.
        """
        self._weight_version, self._found = version, None
        self._num_weights += not renames

    def flush(self) -> None:
        """Empty the cache; pages of ended rows are free once their last step is read."""
        self._pool.release(self._cache.withdraw(0))

    def _namespace(self, sequence: Sequence) -> Hashable:
        return self._num_weights, sequence.request.extra_key

    def _is_current(self, tenancy: Tenancy) -> bool:
        """Return whether all of its KV is from the current weights."""
        return tenancy.namespace == self._namespace(tenancy.sequence)
