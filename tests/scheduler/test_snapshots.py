"""Snapshots of recurrent states: chunk ends of a prompt, starting points of rows, and reused
slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jspec.config.limits import ServeLimits, SnapshotLimits
from jspec.errors import ConfigError, InvariantError
from jspec.messages.plan import SnapshotCopy, StepKind
from jspec.scheduler.pages.prefix_cache import Ids, Node, PrefixCache
from jspec.scheduler.pages.snapshot_space import SnapshotSpace
from tests.scheduler.test_prefix_sharing import turn
from tests.scheduler.test_scheduler import Bench
from tests.scheduler.test_window_sharing import cached_of
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits


def limits_of(*, count: int, stride: int = 2, chunk_size: int = 12) -> ServeLimits:
    roomy = small_limits(
        num_pages=400, num_slots=4, context_length=400, prefix_cache=True, chunk_size=chunk_size
    )
    return with_limits(roomy, page_size=4, snapshots=SnapshotLimits(count, stride))


def test_the_worked_example_of_a_prompt() -> None:
    bench = Bench(with_limits(limits_of(count=9), overlap_depth=0))
    bench.submit(turn("a", *range(25), *range(5)))
    ends, saves = [], []
    while (plan := bench.dispatch()) is not None and plan.kind is StepKind.PREFILL:
        ends.append(plan.chunks[0].start + len(plan.chunks[0].token_ids))
        saves.append(len(plan.saves))
        bench.collect()
    assert ends == [8, 16, 28, 30]
    assert saves == [1, 1, 1, 0]


@given(
    start=st.integers(0, 60),
    length=st.integers(1, 40),
    stride=st.integers(1, 4),
    last=st.integers(0, 25),
)
def test_a_chunk_is_cut_only_where_a_state_is_saved_and_no_saved_place_is_passed(
    start: int, length: int, stride: int, last: int
) -> None:
    space, most = SnapshotSpace(SnapshotLimits(1, stride), index=0, page_size=4), start + length
    end = space.chunk_end(start, most, last=4 * last)
    assert start < end <= most
    assert end == most or space.saves_at(end, last=4 * last)
    assert not start < 4 * last < end
    if not space.saves_at(end, last=4 * last):
        assert not any(space.saves_at(each, last=4 * last) for each in range(start + 1, end))


def test_a_row_starts_at_the_last_snapshot_of_its_text() -> None:
    bench = Bench(limits_of(count=9))
    text = tuple(range(26))
    assert cached_of(bench, turn("a", *text, 1, 2, 3, 4)) == 0
    assert cached_of(bench, turn("b", *text, 1, 2, 3, 4)) == 28  # the end of the prompt
    assert cached_of(bench, turn("c", *text[:23], 9, 9)) == 16  # pages are cached up to 20
    assert cached_of(bench, turn("d", *text[:7], 9, 9)) == 0


def test_the_slot_used_least_recently_is_reused_first() -> None:
    bench = Bench(limits_of(count=2, stride=100))
    asked = [turn(name, *[i] * 10, max_new_tokens=1) for i, name in enumerate("abc")]
    found = [cached_of(bench, asked[i]) for i in (0, 1)]
    found += [cached_of(bench, replace(asked[0], request_id="a2")), cached_of(bench, asked[2])]
    found += [cached_of(bench, replace(asked[i], request_id=f"{i} again")) for i in (0, 1)]
    assert found == [0, 0, 8, 0, 8, 0]


def test_ends_of_prompts_outlast_the_middle_of_a_long_one() -> None:
    bench = Bench(limits_of(count=6))
    asked = [turn(f"a{i}", i, *range(10), max_new_tokens=1) for i in range(4)]
    assert [cached_of(bench, request) for request in asked] == [0] * 4
    assert cached_of(bench, turn("long", *[5] * 300, max_new_tokens=1)) == 0
    again = [replace(request, request_id=f"b{i}") for i, request in enumerate(asked)]
    assert [cached_of(bench, request) for request in again] == [8] * 4


def test_a_node_that_loses_its_page_loses_its_snapshot() -> None:
    space = SnapshotSpace(SnapshotLimits(1, 1), index=0, page_size=2)
    cache = PrefixCache((space,), page_size=2, lookahead=0)
    node = cache.extend(cache.root("x"), (1, 2), known=2)
    snapshot = space.allocate()
    assert snapshot == 1
    assert space.allocate() is None
    space.publish(snapshot, node, writer=3)
    assert (space.num_cached, space.num_leaked(0), space.restore(node)) == (1, 0, 1)
    cache.forget(node)
    assert (space.num_cached, space.num_leaked(0), cache.match("x", (1, 2, 3))) == (0, 0, [])
    with pytest.raises(InvariantError, match="a row starts after 1 pages; expected a snapshot"):
        space.restore(node)


def test_a_failed_step_takes_its_snapshots_with_it() -> None:
    bench = Bench(with_limits(limits_of(count=9), overlap_depth=2))
    bench.submit(turn("a", *range(20)))
    plans = [bench.must_dispatch(StepKind.PREFILL) for _ in range(2)]
    assert [plan.saves for plan in plans] == [(SnapshotCopy(1, 1),), (SnapshotCopy(1, 2),)]
    bench.scheduler.fail()
    snapshots = bench.scheduler._ranks.all[0].pages.snapshots
    assert snapshots is not None
    assert (snapshots.num_cached, bench.scheduler.stats.num_leaked_pages) == (0, 0)


@pytest.mark.parametrize(("count", "stride", "name"), [(0, 1, "count"), (1, 0, "stride")])
def test_a_number_below_one_is_refused(count: int, stride: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of state snapshots is 0; expected at least 1"):
        SnapshotLimits(count, stride)


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


class Snapshots(RuleBasedStateMachine):
    """Slots are saved, found, restored and lost; the model is a dict from prefix to slot."""

    @initialize(count=st.integers(1, 5))
    def start(self, count: int) -> None:
        self.space = SnapshotSpace(SnapshotLimits(count, 1), index=0, page_size=1)
        self.cache = PrefixCache((self.space,), page_size=1, lookahead=0)
        self.pending: list[int] = []
        self.slots: dict[Ids, int] = {}  # least recently used first
        self.writers: dict[Ids, int] = {}
        self.sought: set[Ids] = set()
        self.step = 0

    def last_saved(self, ids: Ids) -> Ids:
        """Return the longest saved prefix; () without one."""
        return next((ids[:n] for n in range(len(ids), 0, -1) if ids[:n] in self.slots), ())

    def path(self, ids: Ids) -> list[Node]:
        return self.cache.match("x", (*ids, 0))

    @rule()
    def save(self) -> None:
        lost = None
        if len(self.slots) + len(self.pending) == self.space.num_snapshots:
            lost = next((key for key in self.slots if key not in self.sought), None)
            lost = lost or next(iter(self.slots), None)
            if lost is None:
                assert self.space.allocate() is None
                return
        slot = self.space.allocate()
        assert slot is not None
        if lost is not None:
            assert self.slots.pop(lost) == slot
        assert slot not in {*self.pending, *self.slots.values()}
        self.pending.append(slot)

    @precondition(lambda self: self.pending)
    @rule(ids=TEXTS, is_lost=st.booleans())
    def publish(self, ids: Ids, is_lost: bool) -> None:
        slot = self.pending.pop()
        self.step += 1
        if is_lost:
            self.space.free(slot)
            return
        node = self.cache.extend(self.cache.root("x"), ids, known=len(ids))
        self.space.publish(slot, node, writer=self.step)
        if ids not in self.slots:
            self.slots[ids], self.writers[ids] = slot, self.step

    @rule(ids=TEXTS)
    def restore(self, ids: Ids) -> None:
        path, key = self.path(ids), self.last_saved(ids)
        assert self.cache.last_start(path) == len(key)
        if key:
            self.slots[key] = self.slots.pop(key)
            assert self.space.restore(path[len(key) - 1]) == self.slots[key]

    @rule(ids=TEXTS)
    def seek(self, ids: Ids) -> None:
        path = self.path(ids)
        if path:
            self.cache.seek(path[-1])
            self.sought.add(self.last_saved(ids))

    @rule(ids=TEXTS)
    def forget(self, ids: Ids) -> None:
        path = self.path(ids)
        if len(path) == len(ids):
            self.cache.forget(path[-1])
            self.slots.pop(ids, None)

    @rule(back=st.integers(0, 4))
    def withdraw(self, back: int) -> None:
        self.cache.withdraw(self.step - back)
        for key in [key for key in self.slots if self.writers[key] >= self.step - back]:
            del self.slots[key]

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        if hasattr(self, "space"):
            alive = {key[:n] for key in self.slots for n in range(1, len(key) + 1)}
            self.sought &= alive
            assert list(self.space._attached) == list(self.slots.values())
            assert self.space.num_leaked(len(self.pending)) == 0
            assert bool(self.cache._roots) == bool(self.slots)


TestSnapshots = Snapshots.TestCase
TestSnapshots.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
