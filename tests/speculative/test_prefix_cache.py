"""Text with the prefix cache equals text without it, for every way of drafting and any cache.

Speculation is as good after a cached prefix as after a computed one: the same drafts are accepted,
and the draft's pages have the same values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jspec.config.drafting import ALGORITHMS
from jspec.config.limits import SnapshotLimits, SpeculativeConfig, WindowSpace
from jspec.engine.plan_runner import Dispatched
from jspec.layers.linear import Shard
from jspec.messages.request import Request, StreamChunk
from jspec.messages.step_options import SAMPLING
from jspec.models.layer import Params
from jspec.pallas_kernels.ops import Ops
from jspec.scheduler import prefill_planner
from jspec.scheduler.scheduler import Scheduler
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.ranked import EagleDrafter
from tests.speculative.engines import (
    Compiled,
    ViewRunner,
    build,
    make_request,
    plain_engine,
    plain_ids,
    tiny_params,
    with_prefix_cache,
)
from tests.speculative.every_drafter import KINDS, Kind, layers_weights, with_all_ids, with_lookup
from tests.speculative.own_layers import head_of
from tests.support.fake_text import FakeTextStream
from tests.support.flat_limits import with_limits

PENALTIES: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.5},
    {"presence_penalty": -1.0, "temperature": 0.0},
    {
        "frequency_penalty": 2.0,
        "presence_penalty": 2.0,
        "min_new_tokens": 6,
        "top_k": 50,
        "repetition_penalty": 1.3,
    },
    {"temperature": 2.0},
)


@dataclass(frozen=True)
class Setting:
    """A way of drafting, of `every_drafter`, and the settings that its engine is compiled for."""

    kind: Kind
    shape: tuple[int, int, int]
    page_size: int


def nextn() -> Kind:
    """One layer that is run again, like MiMo-7B's: hidden first, no embedding at position 0."""

    def make(draft_shape: SpeculativeConfig, ops: Ops, shard: Shard) -> Drafter:
        return EagleDrafter(head_of("mimo", ops, shard), draft_shape)

    def params() -> Params:
        return with_all_ids(layers_weights("mimo"))

    return dataclasses.replace(KINDS["recurrent"], make=make, params=params, aux_layer_ids=())


# One of each algorithm, and a lookup beside a draft model.
SETTINGS = {
    "chain": Setting(KINDS["eagle3"], (2, 1, 3), 1),
    "ngram": Setting(KINDS["ngram"], (3, 2, 7), 16),
    "not_chained": Setting(KINDS["multi_layer_not_chained"], (3, 2, 7), 4),
    "nextn": Setting(nextn(), (3, 1, 4), 4),
    "eagle1": Setting(KINDS["eagle1"], (3, 2, 7), 4),
    "standalone": Setting(KINDS["standalone"], (3, 1, 4), 16),
    "dflash": Setting(KINDS["dflash"], (3, 2, 7), 4),
    "frozen_kv": Setting(KINDS["frozen_kv"], (3, 2, 7), 4),
    "with_lookup": Setting(with_lookup(KINDS["multi_layer_not_chained"]), (3, 1, 6), 4),
}


@functools.cache
def engine(kind: str) -> Compiled:
    if kind == "plain":
        return with_prefix_cache(plain_engine())
    setting = SETTINGS[kind]
    own, target = setting.kind, tiny_params()[0]
    spec = own.spec(setting.shape)
    # A model that drafts for itself is always right; a lookup and heads are as they come.
    draft = own.always_right(()) if kind == "standalone" else own.params()
    return with_prefix_cache(
        build(
            spec,
            page_size=setting.page_size,
            dial=False,
            variants=(SAMPLING,),
            params=(target, draft),
            make=lambda ops, shard: own.make(spec, ops, shard),
            aux_layer_ids=own.aux_layer_ids,
        )
    )


# Compiling dominates a kind's cost. "chain" is fast, and these are of CI's slow suite; a target
# that drafts for itself is in test_window_cache.py.
IN_CI = ("not_chained", "dflash")
DRAFTING = [
    "chain",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in IN_CI),
    *(
        pytest.param(kind, marks=[pytest.mark.slow, pytest.mark.exhaustive])
        for kind in SETTINGS
        if kind not in ("chain", *IN_CI)
    ),
]
KINDS_AND_PLAIN = ["plain", *DRAFTING]


def test_every_way_of_drafting_is_here() -> None:
    """A new algorithm must get a setting above."""
    names = {setting.kind.algorithm.name for setting in SETTINGS.values()}
    assert names | {"NONE"} == set(ALGORITHMS)


class Session:
    """One engine that serves wave after wave of requests, and keeps the cache between them."""

    def __init__(
        self,
        compiled: Compiled,
        *,
        prefix_cache: bool = True,
        chunk_size: int = 32,
        overlap_depth: int = 1,
        num_pages: int | None = None,
        windows: tuple[WindowSpace, ...] | None = None,
        snapshots: SnapshotLimits | None = None,
    ) -> None:
        limits = with_limits(
            compiled.limits,
            windows=compiled.limits.pool.windows if windows is None else windows,
            snapshots=snapshots or compiled.limits.pool.snapshots,
            prefix_cache=prefix_cache,
            prefill_buckets=(chunk_size,),
            overlap_depth=overlap_depth,
            num_pages=num_pages or compiled.limits.pool.num_pages,
        )
        self.compiled = compiled
        self.runner = compiled.runner()
        self.view = ViewRunner(self.runner, limits)
        self.scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)

    @property
    def resumed(self) -> set[str]:
        """Return the requests that resumed over cached output."""
        return {
            admission.request.request_id
            for plan, _ in self.view.steps
            for admission in plan.admissions
            if admission.cached_len > admission.prompt_len
        }

    def serve(
        self, requests: list[Request], *, retract_after: int | None = None
    ) -> list[list[StreamChunk]]:
        """Serve requests together; return the chunks of each. No page leaks before or after.

        retract_after: steps after which all rows go back to the queue.
        """
        chunks: dict[str, list[StreamChunk]] = {r.request_id: [] for r in requests}
        for request in requests:
            self.scheduler.enqueue([request])
        steps: deque[Dispatched] = deque()
        num_steps = len(self.view.steps)
        while True:
            if len(self.view.steps) - num_steps == retract_after and not steps:
                for sequence in reversed(self.scheduler._ranks.running):
                    self.scheduler._retract(sequence)
                retract_after = None
            plan = self.scheduler.plan()
            if plan is not None:
                steps.append(self.view.dispatch(plan))
                continue
            if not steps:
                break
            step = steps.popleft()
            for chunk in self.scheduler.commit(step.plan, self.view.collect(step)):
                chunks[chunk.request_id].append(chunk)
        stats = self.scheduler.stats
        assert (stats.num_leaked_pages, stats.num_free_pages) == (0, stats.num_pages)
        return list(chunks.values())


def ids_of(chunks: list[StreamChunk]) -> tuple[int, ...]:
    return tuple(token_id for chunk in chunks for token_id in chunk.new_ids)


def next_turn(before: Request, said: tuple[int, ...], *, turn: int) -> Request:
    """Continue the conversation with something new."""
    new = make_request(0, prompt_len=5, seed=900 + turn).prompt_ids
    return dataclasses.replace(before, prompt_ids=(*before.prompt_ids, *said, *new))


def conversations(*, num_turns: int, session: Session) -> list[list[StreamChunk]]:
    """Run four rows with a common prefix, `num_turns` turns each; every text is checked."""
    begin = make_request(0, prompt_len=21, seed=1).prompt_ids
    requests = []
    for i, sampling in enumerate(PENALTIES):
        request = make_request(i, prompt_len=3 + i, seed=50 + i, max_new_tokens=20, **sampling)
        requests.append(dataclasses.replace(request, prompt_ids=(*begin, *request.prompt_ids)))
    of_all: list[list[StreamChunk]] = []
    for turn in range(num_turns):
        served = session.serve(requests)
        for request, chunks in zip(requests, served, strict=True):
            assert ids_of(chunks) == plain_ids(request), f"{request.request_id} in turn {turn}"
        of_all += served
        requests = [
            next_turn(request, ids_of(chunks), turn=turn)
            for request, chunks in zip(requests, served, strict=True)
        ]
    return of_all


@pytest.mark.slow_cases("plain]")
@pytest.mark.parametrize("kind", KINDS_AND_PLAIN)
def test_text_with_cache_is_text_without(kind: str) -> None:
    """In large chunks and in small ones, alternating."""
    chunk_size, depth = ((32, 1), (5, 2))[list(SETTINGS).index(kind) % 2 if kind in SETTINGS else 1]
    compiled = engine(kind)
    session = Session(compiled, chunk_size=chunk_size, overlap_depth=depth)
    chunks = conversations(num_turns=3, session=session)
    size = compiled.limits.pool.page_size
    for of_request in chunks[4:]:  # from the second turn on, all but the last words are cached
        last = of_request[-1]
        new = 5 + 1 + compiled.limits.draft_shape.tokens_ahead
        assert last.cached_tokens >= (last.prompt_tokens - new) // size * size
        assert last.cached_tokens % size == 0
    cached = [of_request[-1].cached_tokens for of_request in chunks[:4]]
    common = (21 - compiled.limits.draft_shape.tokens_ahead) // size * size
    # The others waited; in small chunks only until what was left was not worth it.
    least = common if chunk_size > common else common - size
    assert cached[0] == 0
    assert all(least <= found <= common for found in cached[1:])


def test_text_is_the_same_in_a_pool_that_is_short() -> None:
    """There are pages for the prefix of all rows: some are retracted, and cached pages are
    evicted."""
    compiled = engine("chain")
    session = Session(compiled, num_pages=272 // compiled.limits.pool.page_size)
    requests = [
        make_request(i, prompt_len=9, seed=70 + i, max_new_tokens=100, **sampling)
        for i, sampling in enumerate(PENALTIES)
    ]
    served = session.serve(requests)
    for request, chunks in zip(requests, served, strict=True):
        assert ids_of(chunks) == plain_ids(request)
    assert session.scheduler.stats.num_retractions > 0


def resumed_over_output(kind: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the texts of rows that were retracted and found their output cached, and the
    expected ones."""
    compiled = engine(kind)
    session = Session(compiled, overlap_depth=0)
    requests = [
        make_request(i, prompt_len=3 + i, seed=70 + i, max_new_tokens=70, **sampling)
        for i, sampling in enumerate(PENALTIES)
    ]
    steps = {"standalone": 10, "plain": 30}.get(kind, 20)  # before a row has ended
    served = session.serve(requests, retract_after=steps)
    assert session.resumed == {request.request_id for request in requests}
    return [ids_of(chunks) for chunks in served], [plain_ids(request) for request in requests]


@pytest.mark.parametrize("kind", KINDS_AND_PLAIN)
def test_a_row_resumes_over_its_cached_output(kind: str) -> None:
    """With every penalty: the counts are those of the whole fill, however little is computed."""
    said, expected = resumed_over_output(kind)
    assert said == expected


def test_counts_without_the_cached_ids_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: rows do not get the cached ids. Those with penalties write another text, unless
    they computed the whole prompt themselves."""
    monkeypatch.setattr(prefill_planner, "cached_draft_prefills", lambda *_: ())
    prompt = make_request(0, prompt_len=60, seed=80).prompt_ids
    penalties: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 2.0},
        {},
    )
    requests = [
        dataclasses.replace(
            make_request(i, prompt_len=1, seed=80 + i, max_new_tokens=30, **own), prompt_ids=prompt
        )
        for i, own in enumerate(penalties)
    ]
    served = Session(engine("plain")).serve(requests)
    assert [chunks[-1].cached_tokens for chunks in served] == [0, 48, 48]
    is_right = [
        ids_of(chunks) == plain_ids(own) for chunks, own in zip(served, requests, strict=True)
    ]
    assert is_right == [True, False, True]


def accepted_by(chunks: list[StreamChunk]) -> tuple[int, ...]:
    return tuple(chunk.num_accepted for chunk in chunks)


@pytest.mark.parametrize("kind", DRAFTING)
def test_acceptance_warm_equals_cold_and_so_do_the_pages(kind: str) -> None:
    compiled = engine(kind)
    sampling = {"temperature": 2.0}
    if kind == "ngram":  # which needs a text that repeats itself
        sampling = {"temperature": 0.0, "presence_penalty": -2.0}
    first = make_request(0, prompt_len=37, seed=5, max_new_tokens=24, **sampling)
    warm, cold = Session(compiled), Session(compiled, prefix_cache=False)
    request = next_turn(first, ids_of(warm.serve([first])[0]), turn=0)
    of_warm, of_cold = warm.serve([request])[0], cold.serve([request])[0]
    assert of_warm[-1].cached_tokens >= 48
    assert of_cold[-1].cached_tokens == 0
    assert accepted_by(of_warm) == accepted_by(of_cold)
    assert sum(accepted_by(of_cold)) > 0
    committed = len(request.prompt_ids) + 23
    for name in ("kv", "draft_kv"):
        warm_rows, cold_rows = (rows_of(s, name, committed) for s in (warm, cold))
        assert len(warm_rows) == len(cold_rows)
        for ours, theirs in zip(warm_rows, cold_rows, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", DRAFTING)
def test_rows_do_not_depend_on_the_chunks_of_a_prompt(kind: str) -> None:
    """Nor on what a retraction recomputes: in target and draft, up to rounding."""
    compiled = engine(kind)
    request = make_request(0, prompt_len=45, seed=5, max_new_tokens=20, temperature=2.0)
    whole = Session(compiled, prefix_cache=False, chunk_size=32)
    (expected,) = whole.serve([request])
    for chunk_size, retract_after in ((7, None), (32, 6), (5, 12)):
        session = Session(compiled, prefix_cache=False, chunk_size=chunk_size, overlap_depth=0)
        (chunks,) = session.serve([request], retract_after=retract_after)
        assert ids_of(chunks) == ids_of(expected)
        assert chunks[-1].num_retractions == (retract_after is not None)
        # A retraction moves the verifications, and the last proposal is scratch.
        committed = 45 + 19 - compiled.limits.draft_shape.num_scratch_slots
        for name in ("kv", "draft_kv"):
            ours, theirs = (rows_of(each, name, committed) for each in (session, whole))
            for mine, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-5)


def rows_of(session: Session, name: str, count: int) -> list[np.ndarray]:
    """Return the pools' values for the first `count` tokens of the last row, in slot 1."""
    table = np.asarray(session.runner.state.rows.page_table)[1]
    size = session.view.limits.pool.page_size
    pages = table[: -(-count // size)]
    return [
        np.asarray(pool)[pages].reshape(-1, *pool.shape[2:])[:count]
        for pool in getattr(session.runner.state, name)
    ]


@pytest.mark.parametrize("kind", KINDS_AND_PLAIN)
def test_speculation_finds_what_plain_decoding_finds_but_for_a_page(kind: str) -> None:
    """A prompt that ends at a page's edge, and one that continues otherwise after it. A page is at
    least as long as a kind's lookahead: with smaller ones several fewer would be found.
    """
    compiled = engine(kind)
    size, ahead = compiled.limits.pool.page_size, compiled.limits.draft_shape.tokens_ahead
    assert ahead <= size
    session = Session(compiled)
    first = make_request(0, prompt_len=48, seed=3, max_new_tokens=1)
    session.serve([first])
    found = session.serve([first])[0][-1].cached_tokens
    plain = 47 // size * size
    assert plain - size <= found <= plain
    changed = (first.prompt_ids[32] + 1) % 300
    other = dataclasses.replace(first, prompt_ids=(*first.prompt_ids[:32], changed, 2, 3))
    found = session.serve([other])[0][-1].cached_tokens
    assert 32 - size <= found <= 32
    assert found == (32 - ahead) // size * size
    assert ids_of(session.serve([other])[0]) == plain_ids(other)


def test_a_cached_page_of_another_text_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: keys without lookahead. The draft's rows are then another text's."""
    compiled = engine("chain")
    session, cold = Session(compiled), Session(compiled, prefix_cache=False)
    cache = session.scheduler._ranks.all[0].pages._cache
    monkeypatch.setattr(cache, "_lookahead", 0)
    first = make_request(0, prompt_len=30, seed=8, max_new_tokens=1)
    session.serve([first])
    other = dataclasses.replace(first, prompt_ids=(*first.prompt_ids[:20], 1, 2, 3))
    for each in (session, cold):
        assert ids_of(each.serve([other])[0]) == plain_ids(other)  # the text never changes
    warm_rows, cold_rows = (rows_of(s, "draft_kv", 22)[0] for s in (session, cold))
    assert np.abs(warm_rows - cold_rows).max() > 1e-3
