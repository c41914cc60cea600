"""A step's nodes, given to its rows by score: the choice by brute force, and the same text."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.device.batch import DraftTree, Features
from jspec.engine.programs.compilation import ProgramShape, lower
from jspec.engine.programs.program_keys import ProgramKey
from jspec.engine.runner import init_state
from jspec.errors import ConfigError
from jspec.messages.features import SAMPLING
from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.node_budget import (
    best_nodes,
    closed_scores,
    keep_nodes,
    pack_nodes,
    spend_budget,
)
from jspec.speculative.verify import settle
from tests.engine.pool_copies import pool_copies
from tests.speculative.engines import (
    NUM_SLOTS,
    Compiled,
    Served,
    ViewRunner,
    mesh_of,
    serve,
    serve_view,
)
from tests.speculative.law_engines import (
    BUDGET,
    Setting,
    engine,
    no_script,
    plain_texts,
    requests_of,
    scripted,
    with_script,
)
from tests.speculative.test_simulated_acceptance import random_tree, rows_of

_best = jax.jit(best_nodes, static_argnames="num_nodes")
_closed = jax.jit(closed_scores, static_argnames="num_levels")
_keep = jax.jit(keep_nodes)
_pack = jax.jit(pack_nodes, static_argnames="spec")
_spend = jax.jit(spend_budget, static_argnames="spec")
_settle = jax.jit(settle, static_argnames=("spec", "ops"))


def spec_with(total: float | None, shape: tuple[int, int, int] = (3, 2, 7)) -> SpeculativeConfig:
    steps, topk, nodes = shape
    return SpeculativeConfig(
        algorithm=Algorithm.EAGLE3,
        num_steps=steps,
        topk=topk,
        num_draft_tokens=nodes,
        total_nodes_per_row=total,
    )


def random_parents(rng: np.random.Generator, batch: int, nodes: int) -> np.ndarray:
    """Of any trees: a parent is a lower node."""
    parents = np.array([[rng.integers(0, max(n, 1)) for n in range(nodes)] for _ in range(batch)])
    parents[:, 0] = -1
    return parents.astype(np.int32)


def depths_of(parents: np.ndarray) -> np.ndarray:
    depths = np.zeros_like(parents)
    for row, node in itertools.product(range(len(parents)), range(1, parents.shape[1])):
        depths[row, node] = depths[row, parents[row, node]] + 1
    return depths


def one_by_one(
    scores: np.ndarray, parents: np.ndarray, live: np.ndarray, drafting: np.ndarray, total: int
) -> np.ndarray:
    """The roots, then always the best node whose parent is there: by score, node and row."""
    kept = np.zeros(scores.shape, bool)
    kept[live, 0] = True
    while kept.sum() < total:
        open_nodes = [
            (-scores[row, node], node, row)
            for row, node in itertools.product(*map(range, scores.shape))
            if node and not kept[row, node] and kept[row, parents[row, node]] and drafting[row]
        ]
        if not open_nodes:
            break
        _, node, row = min(open_nodes)
        kept[row, node] = True
    return kept


# Few values, so that many are equal; some of them are no scores.
SCORES = [0.0, -0.0, -0.5, -1.0, -1e30, 2.0, math.nan, math.inf, -math.inf, -1e-40]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_the_choice_is_the_greedy_one(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    batch, nodes = 5, 6
    parents = random_parents(rng, batch, nodes)
    tree = DraftTree(
        tokens=jnp.zeros((batch, nodes), jnp.int32),
        parents=jnp.asarray(parents),
        depths=jnp.asarray(depths_of(parents)),
        scores=jnp.asarray(rng.choice(SCORES, (batch, nodes)), jnp.float32),
    )
    if data.draw(st.booleans()):
        tree = dataclasses.replace(tree, scores=None)
    scores = np.asarray(_closed(tree, num_levels=nodes - 1))
    above = np.take_along_axis(scores, np.maximum(parents, 0), axis=1)
    assert np.all(scores[:, 1:] <= above[:, 1:])
    assert np.all(scores[:, 0] == 0)
    live, drafting = rng.random((2, batch)) < 0.8
    total = data.draw(st.sampled_from((5, 8, 13, 30)))
    kept = np.asarray(
        _best(
            jnp.asarray(scores),
            is_live=jnp.asarray(live),
            may_draft=jnp.asarray(drafting),
            num_nodes=total,
        )
    )
    assert kept.tolist() == one_by_one(scores, parents, live, drafting & live, total).tolist()
    assert np.all(np.take_along_axis(kept, np.maximum(parents, 0), axis=1)[:, 1:] >= kept[:, 1:])
    cut, packed = keep_and_pack(tree, kept, total)
    for row, given_up in enumerate(~kept):
        was = np.flatnonzero(~given_up)
        assert cut["was"][row, : len(was)].tolist() == was.tolist()
        for place, node in enumerate(was):
            expected = -1 if node == 0 else np.flatnonzero(was == parents[row, node])[0]
            assert cut["parents"][row, place] == expected
        assert np.all(cut["parents"][row, max(len(was), 1) :] == -1)
        lens = np.diff(packed["cu_nodes"])
        assert lens[row] == len(was)
        own = slice(packed["cu_nodes"][row], packed["cu_nodes"][row + 1])
        assert packed["row_idx"][own].tolist() == [row] * len(was)
        assert packed["node"][own].tolist() == list(range(len(was)))


def keep_and_pack(
    tree: DraftTree, kept: np.ndarray, total: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The cut tree, whose tokens say which node each was, and the places of its nodes."""
    batch, nodes = kept.shape
    named = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    cut = _keep(dataclasses.replace(tree, tokens=named), jnp.asarray(kept))
    spec = SpeculativeConfig(
        algorithm=Algorithm.NGRAM,
        num_steps=nodes,
        topk=2,
        num_draft_tokens=nodes,
        total_nodes_per_row=total / batch,
    )
    slots = jnp.asarray(np.where(kept[:, 0], 1 + np.arange(batch), 0), jnp.int32)
    packed = _pack(cut, slots, spec=spec)
    if packed is None:  # all nodes of all rows: there is nothing to be packed
        assert total == batch * nodes
        lens = kept.sum(axis=1)
        rows = np.repeat(np.arange(batch), lens)
        places = np.concatenate([np.arange(n) for n in lens])
        found = {"cu_nodes": np.append(0, np.cumsum(lens)), "row_idx": rows, "node": places}
    else:
        found = {
            name: np.asarray(getattr(packed, name)) for name in ("cu_nodes", "row_idx", "node")
        }
    return {"was": np.asarray(cut.tokens), "parents": np.asarray(cut.parents)}, found


def test_the_worked_example() -> None:
    tree = DraftTree(
        tokens=jnp.asarray([[70, 1, 2, 3], [40, 4, 5, 6]], jnp.int32),
        parents=jnp.asarray([[-1, 0, 0, 1], [-1, 0, 0, 1]], jnp.int32),
        depths=jnp.asarray([[0, 1, 1, 2]] * 2, jnp.int32),
        scores=jnp.asarray([[0, -0.1, -0.9, -0.2], [0, -0.4, -1.2, -1.5]], jnp.float32),
    )
    spec, rows = spec_with(2.5, (2, 2, 4)), rows_of(2)
    slots = jnp.asarray([1, 2], jnp.int32)
    cut = _spend(tree, rows, slots, spec=spec)
    assert cut.tokens.tolist() == [[70, 1, 3, 0], [40, 4, 0, 0]]
    assert cut.parents.tolist() == [[-1, 0, 1, -1], [-1, 0, -1, -1]]
    packed = _pack(cut, slots, spec=spec)
    assert packed is not None
    assert packed.cu_nodes.tolist() == [0, 3, 5]
    assert packed.num_drafts.tolist() == [2, 1]
    assert packed.of_nodes(cut.tokens).tolist() == [70, 1, 3, 40, 4]
    assert packed.at(jnp.arange(5), jnp.asarray([[0, 2], [0, 1]])).tolist() == [[0, 2], [3, 4]]


@pytest.mark.parametrize("value", [0.99, 7.5, -1.0, math.nan, math.inf])
def test_nonsense_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match=r"speculative_total_nodes_per_row is .* from 1 to N = 7"):
        spec_with(value)


def test_the_budget_of_a_batch() -> None:
    spec = spec_with(2.5)
    assert [spec.total_nodes(batch) for batch in (1, 2, 3, 8)] == [3, 5, 8, 20]
    assert spec_with(1.0).total_nodes(8) == 8
    assert spec_with(6.9).total_nodes(1) is None  # all seven
    assert spec_with(7).total_nodes(8) is None
    assert not spec_with(7).counts_nodes
    assert spec_with(None).total_nodes(8) is None
    with pytest.raises(ConfigError, match=r"simulate_acceptance is 3\.0; expected at most"):
        dataclasses.replace(spec, simulate_acceptance=3.0)
    with pytest.raises(ConfigError, match=r"2\.0, but speculative_algorithm is NONE"):
        _ = EngineArgs(
            speculative_algorithm="NONE", speculative_total_nodes_per_row=2.0
        ).speculative
    args = EngineArgs(speculative_algorithm="NGRAM", speculative_total_nodes_per_row=2.0)
    assert args.speculative.total_nodes(4) == 8


def check(
    setting: Setting, requests: list[Request], *, script: Any = None, own: Any = None, **run: Any
) -> Served:
    """Serves them: plain decoding's text, no step over its budget, and counters that add up."""
    expected = plain_texts(tuple(requests))
    script = scripted(requests, expected) if script is None else script
    served = serve(with_script(engine(setting), script, own=own), requests, **run)
    assert list(served.ids) == expected
    assert served.num_leaked_pages == 0
    spec = engine(setting).program.spec
    batch = run.get("num_slots", NUM_SLOTS)
    for accepted, proposed in zip(served.accepted_together, served.proposed_together, strict=True):
        assert len(proposed) + sum(proposed) <= (spec.total_nodes(batch) or math.inf)
        assert all(a <= p for a, p in zip(accepted, proposed, strict=True))
    for name in ("verify_ct", "num_accepted", "num_proposed", "full_num_emitted"):
        total = sum(getattr(counters, name) for counters in served.per_request)
        assert getattr(served.counters, name) == total, name
    counters = served.counters
    assert sum(counters.accept_histogram) == counters.verify_ct
    assert counters.num_accepted <= counters.num_proposed <= sum(map(sum, served.proposed_together))
    return served


def mixed(seed: int, num_tokens: int = 24) -> list[Request]:
    """Eight rows, greedy and sampled, with filters and penalties, and one that drafts nothing."""
    more: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "frequency_penalty": 0.4},
        {"temperature": 0.0, "speculative": False},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 1.0, "presence_penalty": 0.3, "min_new_tokens": 5},
        {"temperature": 0.7},
    ]
    return [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **more[i]))
        for i, request in enumerate(requests_of(8, num_tokens=num_tokens, seed=seed))
    ]


def test_the_text_is_that_of_plain_decoding() -> None:
    """Rows that are right, rows told garbage (scores that are no numbers), rows left alone."""
    served = check(BUDGET, mixed(4100))
    lens = {n for proposed in served.proposed_together for n in proposed}
    assert 0 in lens, "a row had no draft"
    assert 6 in lens, "a row had all of them"
    assert len(lens) > 4
    assert served.counters.num_accepted > 0
    off = served.per_request[3]
    assert (off.verify_ct, off.num_proposed, off.num_accepted) == (0, 0, 0)


def test_scores_of_nothing_but_nan_change_no_text() -> None:
    own = engine(BUDGET).params["draft"]["own"]
    nan = partial(jax.tree.map, partial(jnp.full_like, fill_value=jnp.nan))
    spoiled = {name: x if name == "draft_ids" else nan(x) for name, x in own.items()}
    check(BUDGET, requests_of(4, num_tokens=20, seed=41), script=no_script(), own=spoiled)


def lowered(compiled: Compiled, spec: SpeculativeConfig) -> jax.stages.Lowered:
    """A decode of all rows."""
    limits = dataclasses.replace(compiled.limits, spec=spec)
    drafter = dataclasses.replace(compiled.program.drafter, spec=spec)  # type: ignore[type-var]
    program = dataclasses.replace(compiled.program, spec=spec, drafter=drafter, features=SAMPLING)
    state = jax.eval_shape(partial(init_state, program, limits, shards=1, kv_dtype=jnp.float32))
    shape = ProgramShape.of(ProgramKey(StepKind.DECODE, NUM_SLOTS, SAMPLING), limits)
    return lower(shape, program, mesh=mesh_of(1), params=compiled.params, state=state)


@pytest.mark.slow
def test_a_budget_of_all_nodes_is_the_program_without_one() -> None:
    compiled = engine(BUDGET)
    everything, unset = (
        lowered(compiled, dataclasses.replace(compiled.program.spec, total_nodes_per_row=total))
        for total in (7.0, None)
    )
    assert everything.as_text() == unset.as_text()


def test_no_pool_is_copied_and_no_node_that_is_not_verified_has_logits() -> None:
    compiled = engine(BUDGET)
    pools = {pool.shape for pool in compiled.runner().state.kv}
    (text,) = (
        executable.as_text()
        for key, executable in compiled.executables.items()
        if key.kind is StepKind.DECODE
    )
    assert "f32[21,1,320]" in text
    assert "f32[8,7,320]" not in text
    for shape in pools:
        assert pool_copies(text, shape) == []


def test_simulated_acceptance_takes_no_draft_that_was_not_verified() -> None:
    spec = dataclasses.replace(spec_with(4.0, (3, 4, 16)), simulate_acceptance=3.0)
    rows = rows_of(6)
    slots = jnp.asarray([1, 2, 3, 0, 4, 5], jnp.int32)
    cut = _spend(random_tree(spec, rows), rows, slots, spec=spec)
    packed = _pack(cut, slots, spec=spec)
    assert packed is not None
    hidden = jnp.arange(24, dtype=jnp.float32)[:, None, None]
    features = Features(hidden=hidden[..., :0], aux_hidden=hidden)
    target_ids = jnp.full((6, 16), 99, jnp.int32)
    kv = (jnp.zeros((1 + 6 * 8, 4, 2, 1)),)
    _, verified = _settle(cut, target_ids, features, kv, rows, spec=spec, ops=Ops(), packed=packed)
    drafts = packed.num_drafts.tolist()
    assert drafts[3] == 0
    assert len(set(drafts)) > 2
    assert verified.num_accepted.tolist() == [min(2, n) for n in drafts]
    for row, (path, accepted) in enumerate(
        zip(verified.node_path.tolist(), verified.num_accepted.tolist(), strict=True)
    ):
        assert max(path) <= drafts[row]
        if slots[row]:
            own = [int(packed.cu_nodes[row]) + node for node in path[: accepted + 1]]
            seen = verified.features.aux_hidden[row, : accepted + 1, 0].tolist()
            assert seen == own
        assert verified.features.aux_hidden[row, accepted + 1 :].tolist() == [[0]] * (3 - accepted)


# By kind: chains and trees, from the roots alone to all nodes but a few.
ENGINES = (
    Setting("eagle3", (3, 1, 4), 16, total=2.0),
    Setting("eagle3", (3, 1, 4), 1, total=1.0),
    Setting("eagle3", (3, 4, 16), 4, total=15.8, rounds=2),
    Setting("eagle1", (2, 2, 7), 4, total=3.5, shards=2),
    Setting("ngram", (3, 3, 10), 16, total=4.0),
    Setting("ngram", (5, 1, 6), 4, total=2.5),
    Setting("standalone", (3, 1, 4), 16, total=2.25),
    Setting("standalone", (2, 2, 7), 4, total=3.0, shards=2),
    Setting("multi_layer_not_chained", (3, 1, 4), 64, total=2.5),
    Setting("multi_layer_not_chained", (3, 2, 11), 4, total=5.0, shards=2),
    Setting("multi_layer_chained", (3, 1, 4), 16, total=3.0, rounds=3),
    Setting("recurrent", (2, 2, 7), 16, total=4.5),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.exhaustive if i % 2 else ())
        for i, each in enumerate(ENGINES)
    ],
)
def test_every_drafter_says_what_plain_decoding_says(setting: Setting) -> None:
    """In full batches, and in smaller ones whose rows get more."""
    served = check(setting, mixed(4200))
    if setting.total and setting.total >= 2:
        assert served.counters.num_accepted > 0
    check(setting, mixed(4300)[:5], overlap_depth=2, chunk_size=5)


@pytest.mark.slow
def test_two_devices_choose_the_same_nodes() -> None:
    """All that a step leaves is equal, bit for bit, on both."""
    setting = dataclasses.replace(BUDGET, shards=2)
    requests = mixed(4500)
    compiled = with_script(engine(setting), scripted(requests, plain_texts(tuple(requests))))
    view = ViewRunner(compiled.runner(), compiled.limits)
    served = asyncio.run(serve_view(view, requests))
    assert list(served.ids) == plain_texts(tuple(requests))
    rows = view.runner.state.rows
    for leaf in jax.tree.leaves((rows.root_ids, rows.seq_lens, view.runner.state.draft)):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        first, second = copies
        np.testing.assert_array_equal(first, second)
