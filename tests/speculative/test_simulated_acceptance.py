"""Simulated acceptance: exact counts, real costs, off by default, not available to requests."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DecodeBatch, DraftTree, Features, PrefillBatch, Verified
from jspec.device.state import RowState, SamplingBatch, empty_sampling
from jspec.errors import ConfigError, RequestError
from jspec.messages.request import Request, SamplingParams
from jspec.messages.step_options import StepOptions
from jspec.pallas_kernels.bonus_token.reference import gather_emitted
from jspec.pallas_kernels.compaction.reference import compact_path
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.accept import accept_tree
from jspec.speculative.drafter import StepBatch
from jspec.speculative.tree import Level, build_tree
from jspec.speculative.verify import forced_path, settle, simulated_drafts
from tests.speculative.engines import build, make_request, serve, spec_of

PAGE_SIZE, BATCH = 4, 6


def rows_of(batch: int, *, seed: int = 0) -> StepBatch:
    rng = np.random.default_rng(seed)
    sampling = empty_sampling(batch, vocab_size=100)
    seeds = jnp.asarray(rng.integers(0, 2**32, (batch, 2), dtype=np.uint32))
    return StepBatch(
        root_ids=jnp.asarray(rng.integers(0, 100, batch), jnp.int32),
        seq_lens=jnp.asarray(rng.integers(1, 12, batch), jnp.int32),
        page_table=1 + jnp.arange(batch * 8, dtype=jnp.int32).reshape(batch, 8),
        sampling=replace(sampling, seed=seeds),
    )


def random_tree(draft_shape: SpeculativeConfig, rows: StepBatch, *, seed: int = 0) -> DraftTree:
    """Return a tree like propose's, with random scores; ids of siblings differ."""
    rng = np.random.default_rng(seed)
    batch, topk = rows.root_ids.shape[0], draft_shape.topk
    levels, scores, first = [], np.zeros((batch, 1)), -1
    for depth in range(draft_shape.num_steps):
        beams = 1 if depth == 0 else topk
        best = np.argsort(-scores, axis=1, kind="stable")[:, :beams]
        if depth == 1:  # all of level 1, as it comes
            best = np.tile(np.arange(topk), (batch, 1))
        above = np.take_along_axis(scores, best, axis=1)
        scores = (above[:, :, None] - rng.exponential(1, (batch, beams, topk))).reshape(batch, -1)
        levels.append(
            Level(
                ids=jnp.asarray(np.tile(np.arange(beams * topk) + 10, (batch, 1)), jnp.int32),
                scores=jnp.asarray(scores, jnp.float32),
                parents=jnp.asarray(np.repeat(first + best, topk, axis=1), jnp.int32)
                if depth
                else jnp.full((batch, topk), -1, jnp.int32),
            )
        )
        first = 0 if depth == 0 else first + beams * topk if depth > 1 else topk
    return build_tree(rows.root_ids, tuple(levels), num_draft_tokens=draft_shape.num_draft_tokens)


def settled(
    draft_shape: SpeculativeConfig, *, target_ids: jax.Array | None = None, seed: int = 0
) -> tuple[jax.Array, Verified, DraftTree, StepBatch]:
    rows = rows_of(BATCH, seed=seed)
    tree = random_tree(draft_shape, rows, seed=seed)
    nodes = draft_shape.num_draft_tokens
    if target_ids is None:  # 99 is no draft: the real walk accepts none
        target_ids = jnp.full((BATCH, nodes), 99, jnp.int32)
    hidden = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.float32)[:, None], (BATCH, nodes, 2))
    pages = jnp.arange((1 + BATCH * 8) * PAGE_SIZE, dtype=jnp.float32)
    kv = (jnp.broadcast_to(pages.reshape(-1, PAGE_SIZE, 1, 1), (1 + BATCH * 8, PAGE_SIZE, 2, 1)),)
    features = Features(hidden=hidden[:, :, :0], aux_hidden=hidden)
    (after,), verified = settle(
        tree, target_ids, features, kv, rows, draft_shape=draft_shape, ops=Ops()
    )
    return after, verified, tree, rows


@pytest.mark.parametrize("shape", [(1, 1, 2), (4, 2, 3)])
def test_whole_numbers_are_exact_in_every_row(shape: tuple[int, int, int]) -> None:
    for num_emitted in range(1, shape[0] + 2):
        spec = replace(spec_of(*shape), simulate_acceptance=float(num_emitted))
        _, verified, _, _ = settled(spec)
        assert verified.num_accepted.tolist() == [num_emitted - 1] * BATCH
        assert np.all(np.asarray(verified.emitted_ids)[:, :num_emitted] == 99)
        assert np.all(np.asarray(verified.emitted_ids)[:, num_emitted:] == 0)


def test_a_real_walk_that_is_longer_is_cut_and_followed() -> None:
    """The target chose the root's last child, to which a simulated walk would not go."""
    rows = rows_of(BATCH)
    spec = replace(spec_of(2, 2, 7), simulate_acceptance=2.0)  # N - 1 is all of the pool
    tree = random_tree(spec, rows)
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2]] * BATCH
    target_ids = jnp.zeros((BATCH, 7), jnp.int32).at[:, 0].set(tree.tokens[:, 2])
    target_ids = target_ids.at[:, 2].set(tree.tokens[:, 6])  # accepted for real, and cut
    _, real, _, _ = settled(spec_of(2, 2, 7), target_ids=target_ids)
    assert real.node_path.tolist() == [[0, 2, 6]] * BATCH
    _, verified, _, _ = settled(spec, target_ids=target_ids)
    assert verified.num_accepted.tolist() == [1] * BATCH
    assert verified.node_path.tolist() == [[0, 2, 0]] * BATCH


def test_the_path_goes_on_where_the_real_walk_ends() -> None:
    tree = DraftTree(
        tokens=jnp.asarray([[7, 1, 2, 3, 4]], jnp.int32),
        parents=jnp.asarray([[-1, 0, 0, 1, 1]], jnp.int32),
        depths=jnp.asarray([[0, 1, 1, 2, 2]], jnp.int32),
    )

    def path(real: list[int], num_accepted: int, forced: int) -> list[int]:
        counts = (jnp.asarray([n], jnp.int32) for n in (num_accepted, forced))
        return forced_path(tree, jnp.asarray([real], jnp.int32), *counts)[0].tolist()

    assert path([0, 0, 0], 0, 2) == [0, 1, 3]  # first children
    assert path([0, 2, 0], 1, 2) == [0, 2, 3]  # node 2 has none: the next node
    assert path([0, 1, 4], 2, 2) == [0, 1, 4]  # the real walk itself
    assert path([0, 1, 4], 2, 1) == [0, 1, 0]  # cut
    assert path([0, 1, 4, 0], 2, 3) == [0, 1, 4, 4]  # the last node is followed by itself


def test_compaction_still_moves_the_paths_rows() -> None:
    spec = replace(spec_of(3, 4, 16), simulate_acceptance=3.0)
    after, verified, _, rows = settled(spec)
    moved = 0
    for b in range(BATCH):
        length = int(rows.seq_lens[b])
        table = np.asarray(rows.page_table[b])
        for i in (1, 2):
            slot, node = length + i, int(verified.node_path[b, i])
            held = float(after[table[slot // PAGE_SIZE], slot % PAGE_SIZE, 0, 0])
            source = length + node
            assert held == table[source // PAGE_SIZE] * PAGE_SIZE + source % PAGE_SIZE
            moved += node != i
    assert moved > 0


def test_the_drafter_sees_the_paths_features() -> None:
    _, verified, _, _ = settled(replace(spec_of(3, 4, 16), simulate_acceptance=3.0))
    seen = np.asarray(verified.features.aux_hidden)[:, :, 0]
    assert np.array_equal(seen, np.asarray(verified.node_path))


@settings(max_examples=10)
@given(mean=st.floats(1.0, 4.0), seed=st.integers(0, 2**32 - 1))
def test_fractions_are_right_on_average(mean: float, seed: int) -> None:
    """A row's positions follow each other: each step advances by what it emitted."""
    rows = rows_of(2000, seed=seed)
    drafts = np.asarray(simulated_drafts(rows, mean_emitted=mean))
    whole = int(np.floor(mean))
    assert set(drafts) <= {whole - 1, whole}
    p = mean - whole
    assert abs(drafts.mean() + 1 - mean) <= 5 * (p * (1 - p) / drafts.size) ** 0.5 + 1e-6


def test_one_sequences_own_mean_is_right() -> None:
    rows = rows_of(1)
    step = jax.jit(partial(simulated_drafts, mean_emitted=2.25))
    length, emitted = 5, []
    for _ in range(1500):
        emitted.append(int(step(replace(rows, seq_lens=jnp.asarray([length], jnp.int32)))[0]) + 1)
        length += emitted[-1]
    assert abs(np.mean(emitted) - 2.25) < 5 * (0.25 * 0.75 / 1500) ** 0.5
    assert set(emitted) == {2, 3}


def plain_settle(
    tree: DraftTree, ids: Any, features: Features, kv: Any, rows: Any, *, draft_shape: Any
) -> Any:
    """settle without the option: the programs must equal it when the option is off."""
    node_path, num_accepted = accept_tree(
        tree, ids, num_levels=draft_shape.num_steps, may_accept=rows.sampling.speculative > 0
    )
    if draft_shape.topk > 1:
        kv = tuple(
            compact_path(pages, rows.page_table, rows.seq_lens, node_path, num_accepted)
            for pages in kv
        )
    emitted_ids, bonus_ids, on_path = gather_emitted(
        ids, features.aux_hidden, node_path, num_accepted
    )
    return kv, Verified(
        emitted_ids=emitted_ids,
        bonus_ids=bonus_ids,
        num_accepted=num_accepted,
        node_path=node_path,
        features=Features(hidden=jnp.zeros((*node_path.shape, 0)), aux_hidden=on_path),
    )


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 16)])
def test_off_means_the_same_program_and_on_another(shape: tuple[int, int, int]) -> None:
    spec, rows = spec_of(*shape), rows_of(BATCH)
    tree = random_tree(spec, rows)
    nodes = spec.num_draft_tokens
    arguments = (
        tree,
        jnp.zeros((BATCH, nodes), jnp.int32),
        Features(hidden=jnp.zeros((BATCH, nodes, 0)), aux_hidden=jnp.zeros((BATCH, nodes, 2))),
        (jnp.zeros((9, PAGE_SIZE, 2, 1)),),
        rows,
    )

    settled_by = partial(settle, ops=Ops())

    def text(function: Any, draft_shape: SpeculativeConfig) -> str:
        return str(jax.make_jaxpr(partial(function, draft_shape=draft_shape))(*arguments))

    assert text(settled_by, spec) == text(plain_settle, spec)
    simulated = text(settled_by, replace(spec, simulate_acceptance=3.0))
    assert len(simulated.splitlines()) > len(text(settled_by, spec).splitlines())


@pytest.mark.slow
def test_every_verification_of_an_engine_emits_the_same_number() -> None:
    spec = replace(spec_of(3, 4, 16), simulate_acceptance=3.0)
    compiled = build(spec, page_size=16, dial=False, variants=(StepOptions(),))
    requests = [
        make_request(
            i, prompt_len=5 + 3 * i, seed=i, temperature=0.0, max_new_tokens=40, ignore_eos=True
        )
        for i in range(3)
    ]
    served = serve(compiled, requests)
    assert [len(ids) for ids in served.ids] == [40] * 3
    assert {n for row in served.accepted for n in row} == {2}
    assert served.counters.acceptance_length == 3.0
    assert [c.verify_ct for c in served.per_request] == [13] * 3  # 1 + 13 * 3 = 40
    assert served.num_leaked_pages == 0


def test_no_request_can_reach_it() -> None:
    with pytest.raises(RequestError, match="unknown field 'simulate_acceptance'"):
        SamplingParams.from_mapping({"simulate_acceptance": 3.0})
    for kind in (Request, SamplingParams, SamplingBatch, RowState, DecodeBatch, PrefillBatch):
        names = {field.name for field in dataclasses.fields(kind)}
        assert not [name for name in names if "simulat" in name]


@pytest.mark.parametrize(
    ("value", "more", "message"),
    [
        (0.5, {}, "simulate_acceptance is 0.5; expected a number from 1 to S \\+ 1 = 4"),
        (4.1, {}, "expected a number from 1 to S \\+ 1 = 4"),
        (float("nan"), {}, "expected a number from 1"),
        (True, {}, "expected a number from 1"),
        (5.5, {"speculative_num_steps": 4}, "S \\+ 1 = 5"),
        (3.0, {"speculative_algorithm": "NONE"}, "speculative_algorithm is NONE"),
        (3.0, {"model_path": "m"}, "speculative_algorithm is NONE"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    value: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(simulate_acceptance=value, **more)


def test_the_limits_themselves_are_allowed() -> None:
    for value in (1.0, 4.0, 2):
        args = EngineArgs(simulate_acceptance=value)
        assert args.speculative.simulate_acceptance == value
    with pytest.raises(ConfigError, match="NONE"):
        replace(SpeculativeConfig.plain(), simulate_acceptance=1.0)


def test_a_row_may_ask_for_no_speculation() -> None:
    """Simulated or not, it emits one token per verification."""
    for simulated in (None, 3.0):
        spec = replace(spec_of(3, 1, 4), simulate_acceptance=simulated)
        rows = rows_of(BATCH)
        off = jnp.arange(BATCH, dtype=jnp.int32) % 2
        rows = replace(rows, sampling=replace(rows.sampling, speculative=off))
        tree = random_tree(spec, rows)
        follows = jnp.roll(tree.tokens, -1, axis=1)  # the whole chain is right
        features = Features(
            hidden=jnp.zeros((BATCH, 4, 0)), aux_hidden=jnp.zeros((BATCH, 4, 2), jnp.float32)
        )
        _, verified = settle(tree, follows, features, (), rows, draft_shape=spec, ops=Ops())
        accepted = np.asarray(verified.num_accepted)
        assert set(accepted[off == 0]) == {0}
        assert accepted[off == 1].min() > 0
        assert np.array_equal(verified.bonus_ids[off == 0], follows[off == 0, 0])
