"""The output is the same whatever the order of submits, aborts, dispatches and collects.

The fake runner checks every plan; this machine checks the output.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jspec.config.limits import Algorithm, PriorityOrder, ServeLimits, SnapshotLimits, WindowSpace
from jspec.errors import QueueFullError, RequestError
from jspec.messages.plan import StepPlan
from jspec.messages.request import FinishKind, Request, SamplingParams, SpecCounters, StreamChunk
from jspec.scheduler.outputs.token_history import Tally
from jspec.scheduler.pages.budget import clip_max_new_tokens
from jspec.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import check_rows_have_slots
from tests.support.fake_ranks import FakeRanks, Handles
from tests.support.fake_runner import hash_token, random_acceptance, small_limits
from tests.support.fake_text import FakeTextStream, expected_output, text_of
from tests.support.flat_limits import with_limits
from tests.support.random_shapes import RandomShapes

# They differ in scratch writes, lookahead and lag.
ALGORITHMS = [Algorithm.EAGLE3, Algorithm.STANDALONE, Algorithm.MULTI_LAYER_EAGLE]
SPECS = [(0, 1, 1), (1, 1, 2), (3, 1, 4), (2, 2, 4), (2, 3, 12)]


def smaller(spec: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """Return the other shapes: plain steps, and one level."""
    steps, topk, nodes = spec
    one = (1, topk, min(1 + topk, nodes))
    return ((0, 1, 1), one) if steps > 1 else ((0, 1, 1),) if steps else ()


def with_windows(limits: ServeLimits, windows: list[int], *, spare_pages: int) -> ServeLimits:
    """Add window spaces with the fewest pages that are allowed, and a few more."""
    of_chunks = limits.pages_of_chunks(limits.programs.chunk_size) + spare_pages
    return with_limits(
        limits,
        windows=tuple(
            WindowSpace(window, limits.window_pages_per_row(window) + of_chunks)
            for window in sorted(windows)
        ),
    )


class Interleavings(RuleBasedStateMachine):
    """Pools of 64 to 192 tokens and requests of up to 90 tokens: pages are always short.

    Each data rank has a fake runner with such a pool, so that a row of one never has pages of
    another.
    """

    @initialize(
        spec=st.sampled_from(SPECS),
        algorithm=st.sampled_from(ALGORITHMS),
        page_size=st.sampled_from([1, 4, 16, 64]),
        capacity_pages=st.integers(1, 3),
        depth=st.integers(0, 3),
        num_rounds=st.sampled_from([1, 2, 3, 7]),
        num_slots=st.integers(1, 4),
        chunk_size=st.integers(1, 16),
        prefill_rows=st.integers(1, 3),
        acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        salt=st.integers(0, 3),
        windows=st.lists(st.sampled_from([1, 3, 8, 40, 200]), max_size=2, unique=True),
        spare_pages=st.integers(0, 6) | st.integers(0, 60),
        prefix_cache=st.booleans(),
        snapshots=st.none() | st.builds(SnapshotLimits, st.integers(1, 5), st.integers(1, 3)),
        shapes_seed=st.none() | st.integers(0, 9),
        order=st.sampled_from(PriorityOrder),
        num_ranks=st.sampled_from([1, 2, 3]),
    )
    def start(
        self,
        spec: tuple[int, int, int],
        algorithm: Algorithm,
        page_size: int,
        capacity_pages: int,
        depth: int,
        num_rounds: int,
        num_slots: int,
        chunk_size: int,
        prefill_rows: int,
        acceptance: float,
        salt: int,
        windows: list[int],
        spare_pages: int,
        prefix_cache: bool,
        snapshots: SnapshotLimits | None,
        shapes_seed: int | None,
        order: PriorityOrder,
        num_ranks: int,
    ) -> None:
        roomy = small_limits(
            steps_topk_nodes=spec,
            algorithm=algorithm,
            num_slots=num_slots,
            num_pages=1000,
            page_size=page_size,
            context_length=100,
            chunk_size=chunk_size,
            prefill_rows=prefill_rows,
            overlap_depth=depth,
            num_rounds=num_rounds,
            max_queued_requests=4,
            prefix_cache=prefix_cache,
            shapes=smaller(spec) if shapes_seed is not None else (),
        )
        num_pages = capacity_pages * 64 // page_size + roomy.draft_shape.num_scratch_pages(
            page_size
        )
        full = with_limits(roomy, num_pages=num_pages, priority_order=order, snapshots=snapshots)
        full = with_limits(full, num_ranks=num_ranks)
        self.limits = with_windows(full, windows, spare_pages=spare_pages)
        self.accepted_at = random_acceptance(acceptance, spec[0], salt=salt)
        self.runner = FakeRanks(self.limits, accepted_at=self.accepted_at)
        self.scheduler = Scheduler(
            self.limits,
            make_stream=FakeTextStream.for_request,
            shapes=None if shapes_seed is None else RandomShapes(self.limits, seed=shapes_seed),
        )
        self.in_flight: deque[StepPlan] = deque()
        self.handles: deque[Handles] = deque()
        self.requests: dict[str, Request] = {}
        self.chunks: dict[str, list[StreamChunk]] = {}
        self.live: set[str] = set()
        self.num_updates = 0

    @rule(
        prompt_len=st.integers(0, 105) | st.integers(1, 8),
        max_new_tokens=st.integers(1, 90),
        min_new_tokens=st.integers(0, 3),
        stop=st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=1),
        eos=st.lists(st.integers(0, 40), max_size=1),
        seed=st.integers(0, 2**64 - 1) | st.integers(0, 1),
        extra_key=st.sampled_from([None, None, "k"]),
        priority=st.integers(-2, 2),
        caller=st.sampled_from([None, "a", "b"]),
    )
    def submit(
        self,
        max_new_tokens: int,
        min_new_tokens: int,
        stop: list[str],
        eos: list[int],
        seed: int,
        prompt_len: int = 0,
        prompt: tuple[int, ...] = (),
        extra_key: str | None = None,
        priority: int = 0,
        caller: str | None = None,
    ) -> None:
        name = f"r{len(self.requests)}"
        prompt_ids = prompt or (0,) * prompt_len
        prompt_len = len(prompt_ids)
        request = Request(
            request_id=name,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(
                max_new_tokens=max_new_tokens,
                min_new_tokens=min(min_new_tokens, max_new_tokens),
                stop=tuple(stop),
            ),
            seed=seed,
            eos_token_ids=tuple(eos),
            extra_key=extra_key,
            caller=caller,
            priority=0 if self.limits.scheduling.priority_order is PriorityOrder.OFF else priority,
        )
        try:
            self.scheduler.enqueue([request])
        except RequestError:
            fits = 1 <= prompt_len <= min(100 - max_new_tokens, self.limits.max_total_tokens)
            assert not fits
        except QueueFullError:
            assert self.scheduler.stats.num_queued >= 4
        else:
            self.requests[name] = request
            self.chunks[name] = []
            self.live.add(name)

    @rule(
        priorities=st.lists(st.integers(-2, 2), min_size=1, max_size=4),
        prompt_len=st.integers(1, 8),
    )
    def submit_long(self, priorities: list[int], prompt_len: int) -> None:
        """Submit requests that only their length ends: together they exceed the pool."""
        for priority in priorities:
            self.submit(
                prompt_len=prompt_len,
                max_new_tokens=90,
                min_new_tokens=0,
                stop=[],
                eos=[],
                seed=len(self.requests),
                priority=priority,
            )

    @rule(
        lengths=st.lists(st.sampled_from([20, 60, 90]), min_size=2, max_size=3),
        prompt_len=st.integers(1, 8),
        seed=st.integers(0, 1),
        priority=st.integers(-2, 2),
    )
    def submit_twins(self, lengths: list[int], prompt_len: int, seed: int, priority: int) -> None:
        """Submit equal requests: each may compute what another one has in the cache."""
        for max_new_tokens in lengths:
            self.submit(
                prompt_len=prompt_len,
                max_new_tokens=max_new_tokens,
                min_new_tokens=0,
                stop=[],
                eos=[],
                seed=seed,
                priority=priority,
            )

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), more=st.lists(st.integers(0, 25), max_size=3))
    def submit_next_turn(self, data: st.DataObject, more: list[int]) -> None:
        """Submit a prompt that starts with another request and its output so far."""
        before = data.draw(st.sampled_from(sorted(self.chunks)))
        said = tuple(i for chunk in self.chunks[before] for i in chunk.new_ids)
        self.submit(
            prompt=(*self.requests[before].prompt_ids, *said, *more),
            max_new_tokens=5,
            min_new_tokens=0,
            stop=[],
            eos=[],
            seed=len(self.requests),
        )

    @rule()
    def flush_cache(self) -> None:
        assert self.scheduler.flush_cache() == (not self.live)
        if not self.live and not self.in_flight:
            assert self.scheduler.stats.num_cached_pages == 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        chunk = self.scheduler.abort(name)
        assert chunk is not None
        self.receive(chunk)

    @rule(count=st.integers(1, 3))
    def dispatch(self, count: int) -> None:
        for _ in range(count):
            plan = self.scheduler.plan()
            if plan is not None:
                check_rows_have_slots(self.scheduler, plan)
                self.handles.append(self.runner.dispatch(plan))
                self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        result = self.runner.collect(self.handles.popleft())
        for chunk in self.scheduler.commit(self.in_flight.popleft(), result):
            self.receive(chunk)

    @precondition(lambda self: self.in_flight)
    @rule()
    def lose(self) -> None:
        """The device fails: unread results and the prefix cache are lost, and no more."""
        assert self.scheduler.lose(most=1000) == []
        assert self.scheduler.stats.num_cached_pages == 0
        self.in_flight.clear()
        self.handles.clear()
        self.runner.restart()

    @rule()
    def update_weights(self) -> None:
        """Update between steps; running rows are filled again and find no KV of the former
        weights."""
        while self.in_flight:
            self.collect()
        self.num_updates += 1
        self.scheduler.fail()
        self.scheduler.set_weight_version(str(self.num_updates))

    @rule(turns=st.integers(1, 30))
    def run_on(self, turns: int) -> None:
        for _ in range(turns):
            self.dispatch(count=1)
            if self.in_flight and len(self.in_flight) > self.limits.scheduling.overlap_depth:
                self.collect()

    def receive(self, chunk: StreamChunk) -> None:
        assert chunk.request_id in self.live, "a chunk after the last one"
        self.chunks[chunk.request_id].append(chunk)
        if chunk.finish is not None:
            self.live.remove(chunk.request_id)

    @invariant()
    def no_page_is_lost(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.scheduler.stats.num_leaked_pages == 0

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        turns = 0
        while self.live or self.in_flight:
            turns += 1
            assert turns < 3000, "it runs on without an end"
            self.dispatch(count=3)
            assert self.in_flight, "nothing runs, and requests are left"
            self.collect()
        stats = self.scheduler.stats
        assert stats.num_free_pages == stats.num_pages
        pool = self.limits.pool
        sizes = tuple(pool.num_ranks * space.num_pages for space in pool.windows)
        assert stats.num_free_window_pages == sizes
        assert (stats.num_running, stats.num_queued) == (0, 0)
        for name in self.requests:
            self.check_output(name)
        self.check_totals([chunks[-1] for chunks in self.chunks.values()])

    def check_output(self, name: str) -> None:
        request, chunks = self.requests[name], self.chunks[name]
        ids = tuple(token_id for chunk in chunks for token_id in chunk.new_ids)
        text = "".join(chunk.text for chunk in chunks)
        most = clip_max_new_tokens(
            self.limits, len(request.prompt_ids), request.sampling.max_new_tokens
        )
        expected = expected_output(request, hash_token, max_new_tokens=most)
        last = chunks[-1]
        assert last.finish is not None
        assert last.prompt_tokens == len(request.prompt_ids)
        assert sum(chunk.num_accepted for chunk in chunks) == last.counters.num_accepted
        if last.finish.kind is FinishKind.ABORT:
            assert ids == expected.ids[: len(ids)]
            assert text == text_of(ids)
        else:
            assert (ids, text, last.finish) == (expected.ids, expected.text, expected.finish)
            assert last.cached_tokens < last.prompt_tokens
            is_fixed = len(self.limits.shapes) == 1
            if last.num_retractions == 0 and is_fixed:  # a prefill would start other rounds
                assert chunks[-1].counters == self.counted(request, num_out=len(ids))

    def counted(self, request: Request, *, num_out: int) -> SpecCounters:
        """Return the counters of rounds run one at a time until num_out tokens are out."""
        tally, out = Tally(self.limits.draft_shape), 1
        while out < num_out:
            num_emitted = self.accepted_at(request, len(request.prompt_ids) + out - 1) + 1
            tally.add(num_emitted=num_emitted, num_kept=min(num_emitted, num_out - out))
            out += num_emitted
        return tally.counters

    def check_totals(self, last_chunks: list[StreamChunk]) -> None:
        stats = self.scheduler.stats
        counters = [chunk.counters for chunk in last_chunks]
        every = [chunk for chunks in self.chunks.values() for chunk in chunks]
        assert stats.num_emitted == sum(len(chunk.new_ids) for chunk in every)
        assert stats.num_cached_tokens == sum(chunk.cached_tokens for chunk in last_chunks)
        assert stats.num_retractions == sum(chunk.num_retractions for chunk in last_chunks)
        assert stats.num_finished + stats.num_aborted == stats.num_requests == len(last_chunks)
        for name in (
            "verify_ct",
            "num_accepted",
            "num_proposed",
            "full_verify_ct",
            "full_num_emitted",
        ):
            assert getattr(stats.counters, name) == sum(getattr(c, name) for c in counters), name
        histograms = [c.accept_histogram for c in counters]
        if histograms:
            totals = tuple(sum(column) for column in zip(*histograms, strict=True))
            assert stats.counters.accept_histogram == totals
        assert stats.counters.verify_ct == sum(stats.counters.accept_histogram)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
