"""Text of a recurrent target with the prefix cache equals text without it, and plain decoding's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.config.limits import SnapshotLimits
from jspec.config.shared_prefixes import UNIT
from jspec.engine.plan_runner import Dispatched
from jspec.engine.runner import init_state
from jspec.errors import InvariantError
from jspec.layers.linear import Shard
from jspec.messages.plan import SnapshotCopy, StepKind, StepPlan
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.registry import table_of
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.ranked import EagleDrafter
from tests.engine.pool_copies import pool_copies
from tests.speculative.engines import Compiled, build, corpus_params, make_request, serve
from tests.speculative.every_drafter import KINDS, sharded, with_all_ids
from tests.speculative.mixer_targets import MIXER_TARGETS
from tests.speculative.published_layers import published_config, published_params
from tests.speculative.test_mixer_identity import (
    params_of,
    plain_engine,
    plain_texts,
    requests_of,
)
from tests.speculative.test_prefix_cache import Session, accepted_by, ids_of, next_turn
from tests.speculative.test_shared_prefixes import SHARING, LeadersPages
from tests.support.flat_limits import with_limits
from tests.support.random_shapes import RandomShapes

MANY, FEW = SnapshotLimits(40, 1), SnapshotLimits(2, 2)
TREE, CHAIN = "tree of a lookup", "chain of an MTP layer"
MTP = "qwen3_5"


@functools.cache
def engine(name: str, *, ranks: int = 1, has_shapes: bool = False) -> Compiled:
    """Return an engine with page size 4, two shards and a corpus of the rows' texts, or 16 and
    one. has_shapes: also a plain step and a chain."""
    is_tree = name == TREE
    kind = KINDS["ngram" if is_tree else "recurrent"]
    spec, target = kind.spec((3, 3, 8) if is_tree else (3, 1, 4)), MIXER_TARGETS["hybrid"]
    shards = 2 if is_tree else 1
    said = [each.prompt_ids + plain_ids(each) for each in turns_of(count=3)]
    draft = corpus_params(said) if is_tree else with_all_ids(published_params(MTP))

    def layer_drafter(ops: Ops, shard: Shard) -> Drafter:
        config, names = published_config(MTP)
        return EagleDrafter(FeatureHead(config, ops, shard, names), spec)

    return build(
        spec,
        page_size=4 if is_tree else 16,
        shards=shards,
        ranks=ranks,
        variants=(StepOptions(),),
        params=(sharded(table_of(target), params_of("hybrid"), shards), draft),
        target_spec=target,
        make=(lambda ops, shard: kind.make(spec, ops, shard)) if is_tree else layer_drafter,
        snapshots=MANY,
        shapes=tuple(kind.spec(each) for each in ((0, 1, 1), (1, 1, 2))) if has_shapes else (),
    )


@functools.cache
def plain_ids(request: Request) -> tuple[int, ...]:
    return serve(plain_engine("hybrid"), [request], overlap_depth=0).ids[0]


def turns_of(*, count: int, max_new_tokens: int = 20) -> list[Request]:
    """Return the first turns of conversations that start alike."""
    begin = make_request(0, prompt_len=35, seed=1).prompt_ids
    requests = []
    for i in range(count):
        sampling = {"temperature": i % 2, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        own = make_request(i, prompt_len=3 + i, seed=50 + i, **sampling)
        requests.append(dataclasses.replace(own, prompt_ids=(*begin, *own.prompt_ids)))
    return requests


def converse(session: Session, *, num_turns: int) -> list[list[int]]:
    """Check every text of three conversations; return the cached tokens by turn."""
    requests, cached = turns_of(count=3), []
    for turn in range(num_turns):
        served = session.serve(requests)
        said = [ids_of(chunks) for chunks in served]
        assert said == [plain_ids(request) for request in requests], turn
        cached.append([chunks[-1].cached_tokens for chunks in served])
        turns = zip(requests, said, strict=True)
        requests = [next_turn(request, ids, turn=turn) for request, ids in turns]
    return cached


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk_size", "snapshots"),
    [
        (TREE, 13, FEW),
        (CHAIN, 5, MANY),
        pytest.param(TREE, 32, MANY, marks=pytest.mark.exhaustive),
        pytest.param(CHAIN, 32, FEW, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_conversations_go_on_after_their_states(
    name: str, chunk_size: int, snapshots: SnapshotLimits
) -> None:
    compiled = engine(name, has_shapes=name == TREE)
    session = Session(compiled, chunk_size=chunk_size, snapshots=snapshots)
    cached = converse(session, num_turns=3)
    assert any(any(of_turn) for of_turn in cached)
    if snapshots is MANY:  # a turn starts at the last page end of the prompt before it
        size, ahead = compiled.limits.pool.page_size, compiled.limits.draft_shape.tokens_ahead
        lens = [len(request.prompt_ids) for request in turns_of(count=3)]
        assert cached[1] == [min(n - ahead, n - 1) // size * size for n in lens]


@pytest.mark.slow
def test_any_sequence_of_shapes_gives_the_same_text() -> None:
    """Each step folds what the last one accepted, a smaller tree, a chain or a plain step."""
    compiled = engine(TREE, has_shapes=True)
    requests, expected = requests_of(1.0), plain_texts("hybrid", 1.0)
    said = [r.prompt_ids + ids for r, ids in zip(requests, expected, strict=True)]
    shapes = RandomShapes(compiled.limits, seed=4)
    served = serve(compiled, requests, draft=corpus_params(said), shapes=shapes)
    assert list(served.ids) == expected
    assert min(shapes.used.values()) > 0


def test_without_the_cache_nothing_is_copied() -> None:
    session = Session(engine(TREE), prefix_cache=False)
    assert converse(session, num_turns=2) == [[0] * 3] * 2
    assert not [plan for plan, _ in session.view.steps if plan.restores or plan.saves]


def test_samples_of_one_prompt_start_after_it() -> None:
    prompt = make_request(0, prompt_len=50, seed=9).prompt_ids
    own = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    samples = [
        dataclasses.replace(make_request(i, prompt_len=1, seed=i, **own), prompt_ids=prompt)
        for i in range(6)
    ]
    served = Session(engine(TREE)).serve(samples)
    assert [ids_of(chunks) for chunks in served] == [plain_ids(each) for each in samples]
    assert len({ids_of(chunks) for chunks in served}) > 1
    assert [chunks[-1].cached_tokens for chunks in served] == [0, 48, 48, 48, 48, 48]


def test_retracted_rows_start_after_their_prompts() -> None:
    session = Session(engine(TREE), overlap_depth=0)
    requests = turns_of(count=3, max_new_tokens=60)
    served = session.serve(requests, retract_after=8)
    assert all(sum(accepted_by(chunks)) > 5 for chunks in served)
    assert [ids_of(chunks) for chunks in served] == [plain_ids(each) for each in requests]
    restored = [copy for plan, _ in session.view.steps for copy in plan.restores]
    assert len(restored) >= 3
    assert all(chunks[-1].num_retractions == 1 for chunks in served)


def test_text_is_the_same_in_a_pool_that_is_short() -> None:
    session = Session(engine(TREE), num_pages=192 // engine(TREE).limits.pool.page_size)
    requests = turns_of(count=4, max_new_tokens=100)
    served = session.serve(requests)
    assert [ids_of(chunks) for chunks in served] == [plain_ids(each) for each in requests]
    assert session.scheduler.stats.num_retractions > 0


@pytest.mark.slow
def test_rows_that_share_a_prefix_read_it_together() -> None:
    """Layers with K and V read their leader's pages; every row has its own state."""
    compiled = build(
        KINDS["ngram"].spec((3, 1, 4)),
        page_size=4,
        variants=(StepOptions(),),
        params=(params_of("hybrid"), {}),
        target_spec=MIXER_TARGETS["hybrid"],
        ops=LeadersPages(),
        sharing=SHARING,
        snapshots=MANY,
    )
    session = Session(compiled)
    begin = make_request(0, prompt_len=UNIT + 4, seed=1).prompt_ids
    requests = [
        dataclasses.replace(own, prompt_ids=(*begin, *own.prompt_ids)) for own in turns_of(count=4)
    ]
    served = session.serve(requests)
    assert [ids_of(chunks) for chunks in served] == [plain_ids(each) for each in requests]
    assert any(plan.shared for plan, _ in session.view.steps)


def without_saves(plan: StepPlan) -> StepPlan:
    runs = tuple(run for run in plan.runs if run.kind is not StepKind.SAVE)
    return dataclasses.replace(plan, runs=runs)


def without_restores(plan: StepPlan) -> StepPlan:
    runs = tuple(run for run in plan.runs if run.kind is not StepKind.RESTORE)
    return dataclasses.replace(plan, runs=runs)


def of_another_text(plan: StepPlan) -> StepPlan:
    wrong = tuple(SnapshotCopy(copy.slot, copy.snapshot % 3 + 1) for copy in plan.restores)
    return dataclasses.replace(plan, restores=wrong)


@pytest.mark.parametrize("change", [without_saves, without_restores, of_another_text])
def test_a_wrong_state_would_be_seen(
    change: Callable[[StepPlan], StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutations: all texts except those without a cached prefix then differ."""
    session = Session(engine(TREE))
    dispatch = session.view.dispatch

    def changed(plan: StepPlan) -> Dispatched:
        return dispatch(change(plan))

    monkeypatch.setattr(session.view, "dispatch", changed)
    requests = turns_of(count=3)
    said = [ids_of(chunks) for chunks in session.serve(requests)]
    expected = [plain_ids(request) for request in requests]
    assert said[0] == expected[0]
    assert all(ours != theirs for ours, theirs in zip(said[1:], expected[1:], strict=True))


@pytest.mark.slow
def test_no_copy_takes_a_whole_pool() -> None:
    compiled = engine(CHAIN)
    state: Any = init_state(compiled.program, compiled.limits, shards=1, kv_dtype=jnp.float32)
    shapes = {x.shape for x in jax.tree.leaves((state.kv, state.snapshots)) if x.ndim > 2}
    found = [key for key in compiled.executables if key.kind in (StepKind.RESTORE, StepKind.SAVE)]
    assert [key.bucket for key in found] == [4, 4, 1, 1]
    for key in found:
        text = compiled.executables[key].as_text()
        assert not [line for shape in shapes for line in pool_copies(text, shape)], key


def test_a_prefix_cache_without_snapshots_is_refused() -> None:
    compiled = engine(TREE)
    limits = with_limits(compiled.limits, snapshots=None)
    with pytest.raises(InvariantError, match="a recurrent target has a prefix cache"):
        init_state(compiled.program, limits, shards=2, kv_dtype=jnp.float32)
