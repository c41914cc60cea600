"""Cache spaces and the prefix tree against a naive model: a dict from prefix to page per space.

The same laws hold for the full space and for windows: which row finds, uses and loses which page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jspec.config.limits import ServeLimits, WindowSpace
from jspec.messages.plan import PageGrant, RowRef
from jspec.messages.request import Request, SamplingParams
from jspec.scheduler.outputs.token_history import TokenHistory
from jspec.scheduler.pages import budget
from jspec.scheduler.pages.cache_spaces import CacheSpaces
from jspec.scheduler.pages.page_space import PageSpace, RowPages
from jspec.scheduler.pages.prefix_cache import Ids, Node
from jspec.scheduler.row_table import RowTable
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.spec import indexing
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits

Key = tuple[object, Ids]  # namespace, and the tokens that a page and its lookahead depend on


@dataclass
class Records:
    """The expected cached pages of one space."""

    space: PageSpace
    pages: dict[Key, int] = field(default_factory=dict)
    writers: dict[Key, int] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)  # when a page lost its last user
    sought: set[Key] = field(default_factory=set)

    def unused(self, in_use: set[int]) -> list[Key]:
        """Return keys of unused pages, in the order in which they are evicted."""
        keys = [key for key, page in self.pages.items() if page not in in_use]
        return sorted(keys, key=lambda key: (key in self.sought, self.released[self.pages[key]]))


KEYS = st.sampled_from([None, None, "k"])
# Of a few families, so that many begin alike.
ALIKE = st.builds(
    lambda a, b, end: (0,) * a + (1,) * b + end,
    st.integers(0, 12),
    st.integers(0, 8),
    st.sampled_from([(0,), (1,), (1, 0)]),
)


class Spaces(RuleBasedStateMachine):
    """Rows of tokens 0 and 1 are admitted, filled, emit, are trimmed and end, in any order."""

    @initialize(
        page_size=st.integers(1, 3),
        steps=st.sampled_from([0, 2]),
        windows=st.lists(st.integers(1, 8), max_size=2, unique=True).map(sorted),
        num_pages=st.integers(9, 30),
        spare=st.integers(0, 6),
    )
    def start(
        self, page_size: int, steps: int, windows: list[int], num_pages: int, spare: int
    ) -> None:
        limits = small_limits(
            steps_topk_nodes=(steps, 1, steps + 1),
            num_slots=3,
            num_pages=num_pages,
            page_size=page_size,
            context_length=60,
            chunk_size=6,
            prefill_rows=1,
            overlap_depth=0,
            prefix_cache=True,
        )
        of_chunks = limits.pages_of_chunks(limits.programs.chunk_size) + spare
        spaces = [WindowSpace(w, limits.window_pages_per_row(w) + of_chunks) for w in windows]
        self.limits: ServeLimits = with_limits(limits, windows=tuple(spaces))
        self.spaces, self.table = CacheSpaces(self.limits), RowTable.empty(self.limits)
        self.models = [Records(space) for space in self.spaces.spaces]
        self.rows: dict[int, Tenancy] = {}
        self.tables: dict[int, list[dict[int, int]]] = {}  # as the device has them
        self.arrival = self.step = self.clock = 0

    # The model.

    def key(self, row: Tenancy | Sequence, depth: int) -> Key:
        sequence = row.sequence if isinstance(row, Tenancy) else row
        end = depth * self.limits.pool.page_size + self.limits.draft_shape.tokens_ahead
        return sequence.request.extra_key, sequence.fill_ids[:end]

    def in_use(self, i: int) -> set[int]:
        return {page for row in self.rows.values() for page in row.pages[i].pages}

    def naive_start(self, sequence: Sequence) -> int:
        size, ahead = self.limits.pool.page_size, self.limits.draft_shape.tokens_ahead
        ids = sequence.fill_ids
        most = max(min((len(ids) - ahead) // size, (len(ids) - 1) // size), 0)
        return max(
            depth
            for depth in range(most + 1)
            if all(
                self.key(sequence, each) in model.pages
                for model in self.models
                for each in range(max(depth - model.space.tail, 0) + 1, depth + 1)
            )
        )

    def evict_for(self, i: int, missing: int) -> None:
        """Model the eviction for pages that space i lacks."""
        model, in_use = self.models[i], self.in_use(i)
        unused = model.unused(in_use)
        num_free = model.space.num_pages - len(in_use) - len(unused)
        for key in unused[: max(missing - num_free, 0)]:
            del model.pages[key]
            for other in self.models[1:] if i == 0 else ():
                other.pages.pop(key, None)

    def grow(self, row: Tenancy, end: int) -> None:
        for i, pages in enumerate(row.pages):
            self.evict_for(i, max(end - pages.end, 0))
        before = [list(pages.pages) for pages in row.pages]
        grants = self.spaces.grow(row, end)
        self.take(row, grants)
        for i, (pages, old) in enumerate(zip(row.pages, before, strict=True)):
            new = pages.pages[len(old) :]
            others = [p for r in self.rows.values() if r is not row for p in r.pages[i].pages]
            assert not {*new} & {*old, *others, *self.models[i].pages.values()}
        self.all_is_as_in_the_model()

    def take(self, row: Tenancy, grants: list[PageGrant]) -> None:
        for grant in grants:
            table = self.tables[row.row.slot][grant.space]
            table |= dict(enumerate(grant.pages, grant.index))
        for table, pages in zip(self.tables[row.row.slot], row.pages, strict=True):
            assert [table[i] for i in range(pages.first, pages.end)] == pages.pages

    def publish_model(self, row: Tenancy, *, since: int, seeks: bool) -> None:
        known = row.drafted_len
        last = max(known - self.limits.draft_shape.tokens_ahead, 0) // self.limits.pool.page_size
        last = max(last, self.depth_of(row))  # pages that were found are known
        for i, (model, pages) in enumerate(zip(self.models, row.pages, strict=True)):
            for depth in range(max(since, pages.first) + 1, min(last, pages.end) + 1):
                key, page = self.key(row, depth), pages.pages[depth - 1 - pages.first]
                if key not in model.pages or model.pages[key] not in {page, *self.in_use(i)}:
                    model.pages[key], model.writers[key] = page, self.step
        if seeks:
            self.seek_model(row, last)

    def seek_model(self, row: Tenancy, last: int) -> None:
        for i, model in enumerate(self.models[1:], 1):
            for depth in range(last, max(last - model.space.tail, 0), -1):
                key = self.key(row, depth)
                page = model.pages.get(key)
                if key not in model.sought and page is not None and page not in self.in_use(i):
                    self.clock += 1
                    model.released[page] = self.clock
                model.sought.add(key)

    def dropped(self, i: int, pages: list[int]) -> None:
        """Model a row's release of these pages, in this order."""
        for page in pages:
            if page not in self.in_use(i):
                self.clock += 1
                self.models[i].released[page] = self.clock

    def depth_of(self, row: Tenancy) -> int:
        assert row.last_cached is not None
        return row.last_cached.depth

    # The rules.

    @precondition(lambda self: len(self.rows) < 3)
    @rule(key=KEYS, ids=ALIKE, most=st.integers(1, 30))
    def admit(self, key: str | None, ids: Ids, most: int) -> None:
        self.admit_row(key, ids, most=most)

    def admit_row(self, key: str | None, ids: Ids, *, most: int) -> Tenancy | None:
        if len(ids) > self.limits.max_total_tokens:
            return None
        request = Request(
            request_id=f"r{self.arrival}",
            prompt_ids=ids,
            sampling=SamplingParams(max_new_tokens=most),
            seed=0,
            extra_key=key,
        )
        most = budget.clip_max_new_tokens(self.limits, len(ids), most)
        history = TokenHistory(request, self.limits.draft_shape, stream=None)
        sequence = Sequence(
            request=request,
            arrival=self.arrival,
            max_new_tokens=most,
            text_stream=None,
            history=history,
        )
        self.arrival += 1
        hit = self.spaces.find(sequence)
        assert hit.num_pages == self.naive_start(sequence)
        running = [row.sequence for row in self.rows.values()]
        if not self.spaces.may_admit(sequence, hit, running):
            return None
        slot = min({1, 2, 3} - self.rows.keys())
        row = Tenancy.begin(RowRef(slot, self.arrival), sequence, self.table)
        num_pages = budget.pages_for_admission(
            self.limits, len(ids), num_tokens_left=sequence.num_tokens_left
        )
        for i, model in enumerate(self.models):
            found = range(max(hit.num_pages - model.space.tail, 0) + 1, hit.num_pages + 1)
            expected = [model.pages[self.key(sequence, depth)] for depth in found]
            row.pages += (RowPages(0, pages=expected),)
            self.rows[slot] = row
            if i == 0:
                self.evict_for(0, num_pages - hit.num_pages)
        expected_pages = [list(pages.pages) for pages in row.pages]
        self.tables[slot] = [{} for _ in self.models]
        grants = self.spaces.admit(row, hit, num_pages)
        for pages, expected in zip(row.pages, expected_pages, strict=True):
            assert pages.pages[: len(expected)] == expected
        self.take(row, grants)
        sequence.tenancy = row
        self.seek_model(row, hit.num_pages)
        self.seek_model(row, 0 if hit.reached is None else hit.reached.depth)
        self.all_is_as_in_the_model()
        return row

    @precondition(lambda self: len(self.rows) < 3)
    @rule(texts=st.lists(st.tuples(KEYS, ALIKE), min_size=1, max_size=4), chunk=st.integers(1, 6))
    def serve(self, texts: list[tuple[str | None, Ids]], chunk: int) -> None:
        """Serve one row after the other, from admission to end."""
        for key, ids in texts:
            row = self.admit_row(key, ids, most=len(ids))
            if row is not None:
                while row.num_filled < len(row.fill_ids):
                    self.fill_row(row, chunk)
                for i in range(len(ids) // 3):
                    self.emit_row(row, [i % 2] * (1 + i % 3))
                self.end_row(row, keeps=True)

    def pick(self, data: st.DataObject, *, is_filled: bool | None = None) -> Tenancy | None:
        rows = [
            r for r in self.rows.values() if is_filled in (None, r.num_filled == len(r.fill_ids))
        ]
        return data.draw(st.sampled_from(rows)) if rows else None

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 6))
    def fill(self, data: st.DataObject, count: int) -> None:
        row = self.pick(data, is_filled=False)
        if row is not None:
            self.fill_row(row, count)

    def fill_row(self, row: Tenancy, count: int) -> None:
        end = min(row.num_filled + count, len(row.fill_ids))
        is_final = end == len(row.fill_ids)
        roots = is_final * self.limits.draft_shape.num_root_slots
        self.grow(row, indexing.num_pages(end + roots, self.limits.pool.page_size))
        row.num_filled = end
        self.step += 1
        self.publish_model(row, since=self.depth_of(row), seeks=is_final)
        self.spaces.publish(row, step=self.step)
        self.trim_model(row)

    def trim_model(self, row: Tenancy) -> None:
        """Release what no later query sees, and no other page."""
        length = row.drafted_len - self.limits.draft_shape.lag
        for i, (space, pages) in enumerate(zip(self.spaces.spaces, row.pages, strict=True)):
            table = self.tables[row.row.slot][i]
            seen = 0 if space.keep is None else max(length - (space.keep - 1), 0)
            first = min(seen // self.limits.pool.page_size, max(table, default=-1) + 1)
            gone = [table.pop(index) for index in sorted(table) if index < first]
            assert pages.pages == [table[index] for index in sorted(table)]
            assert len(pages.pages) <= pages.promised
            self.dropped(i, gone)
        self.all_is_as_in_the_model()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), bits=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def emit(self, data: st.DataObject, bits: list[int]) -> None:
        row = self.pick(data, is_filled=True)
        if row is not None:
            self.emit_row(row, bits)

    def emit_row(self, row: Tenancy, bits: list[int]) -> None:
        if row.sequence.num_tokens_left <= len(bits):
            return
        slot = row.row.slot
        if row.is_prefill_read:
            (missing,) = self.table.pages_missing(np.array([slot]), self.limits)
            if missing > self.spaces.num_free:
                return
            self.grow(row, len(row.page_ids) + int(missing))
            bits = bits[: self.limits.draft_shape.max_emitted]
        self.table.append(slot, tuple(bits if row.is_prefill_read else bits[:1]))
        self.step += 1
        length = row.drafted_len - self.limits.draft_shape.lag
        rows = zip(self.spaces.spaces, row.pages, strict=True)
        if any(space.num_unseen(pages, length) for space, pages in rows):
            is_end = row.drafted_len == len(row.fill_ids)
            self.publish_model(row, since=self.depth_of(row), seeks=is_end)
        self.spaces.trim(row, step=self.step)
        self.trim_model(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keeps=st.sampled_from([True, True, False]))
    def end(self, data: st.DataObject, keeps: bool) -> None:
        row = self.pick(data)
        assert row is not None
        self.end_row(row, keeps=keeps)

    def end_row(self, row: Tenancy, *, keeps: bool) -> None:
        self.step += 1
        if keeps:
            self.publish_model(row, since=0, seeks=True)
            self.spaces.keep(row, step=self.step)
        before = [list(pages.pages) for pages in row.pages]
        self.spaces.release(row)
        del self.rows[row.row.slot]
        for i, pages in enumerate(before):
            self.dropped(i, pages[::-1])
        self.all_is_as_in_the_model()

    @rule(back=st.integers(0, 4), flushes=st.booleans())
    def withdraw(self, back: int, flushes: bool) -> None:
        """A step failed, or the cache is flushed; rows may go on."""
        step = 0 if flushes else max(self.step - back, 1)
        self.spaces.flush() if flushes else self.spaces.withdraw(step)
        for model in self.models:
            for key in [key for key in model.pages if model.writers[key] >= step]:
                del model.pages[key]

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        if not hasattr(self, "models"):
            return
        alive = self.alive()
        for i, model in enumerate(self.models):
            space, in_use = model.space, self.in_use(i)
            cached = {
                key_of(node, self.limits): page for page, (node, _) in space._attached.items()
            }
            assert cached == model.pages
            assert space.num_cached == len(cached)
            assert space.num_free == space.num_pages - len(in_use)
            assert space.num_leaked(row.pages[i] for row in self.rows.values()) == 0
            model.sought &= alive
            promised = sum(row.pages[i].promised for row in self.rows.values())
            assert space._promised == promised
            assert space.keep is None or promised <= space.num_pages
        assert self.spaces.num_leaked(self.rows.values()) == 0

    def alive(self) -> set[Key]:
        """Return the prefixes with nodes in the tree: up to a cached page, or to the end of a
        row."""
        size, ahead = self.limits.pool.page_size, self.limits.draft_shape.tokens_ahead
        ends = [key for model in self.models for key in model.pages]
        ends += [self.key(row, self.depth_of(row)) for row in self.rows.values()]
        return {
            (name, ids[: depth * size + ahead])
            for name, ids in ends
            for depth in range(1, (len(ids) - ahead) // size + 1)
        }

    def teardown(self) -> None:
        if not hasattr(self, "models"):
            return
        for row in list(self.rows.values()):
            self.end_row(row, keeps=True)
        self.all_is_as_in_the_model()
        self.spaces.flush()
        for space in self.spaces.spaces:
            assert (space.num_free, space.num_cached) == (space.num_pages, 0)
        assert not self.spaces._cache._roots


def key_of(node: Node, limits: ServeLimits) -> Key:
    path = list(node.path())
    root = path[-1].parent
    assert root is not None
    ids = [token for each in path[:0:-1] for token in each.key[: limits.pool.page_size]]  # type: ignore[index]
    return root.key[1], (*ids, *node.key)  # type: ignore[index,misc]


TestSpaces = Spaces.TestCase
TestSpaces.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
