"""The real runner under the real scheduler: results that overlap, endings and poison must not
change."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.device.state import empty_sampling
from jspec.engine.runner import DeviceRunner
from jspec.layers.linear import Shard, logits_of
from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING
from jspec.pallas_kernels.bundles import OPS
from jspec.sampling.choose import choose
from jspec.scheduler.scheduler import Scheduler
from jspec.serving.loop import EngineLoop
from tests.engine.pool_copies import pool_copies
from tests.models.dense_forward import dense_hidden
from tests.speculative.engines import (
    TARGET,
    Compiled,
    ViewRunner,
    dial_for,
    engine,
    make_request,
    plain_engine,
    plain_ids,
    serve,
    tiny_params,
)
from tests.support.fake_text import FakeTextStream


def tree_engine() -> Compiled:
    return engine((3, 2, 7), 16, options=SAMPLING)


def six_requests(**sampling: Any) -> list[Request]:
    return [
        make_request(
            i,
            prompt_len=4 + 5 * i,
            seed=900 + i,
            temperature=float(i % 2),
            max_new_tokens=20 + 9 * i,
            **sampling,
        )
        for i in range(6)
    ]


def test_plain_decoding_is_the_dense_model_sampled() -> None:
    """The reference: paged, chunked, cached decoding equals one dense forward per token."""
    length, num_new = 9, 12
    request = make_request(0, prompt_len=length, seed=77, temperature=1.0, max_new_tokens=num_new)
    params, _ = tiny_params()
    sampling = dataclasses.replace(
        empty_sampling(1, vocab_size=TARGET.vocab_size),
        temperature=jnp.ones((1,), jnp.float32),
        seed=jnp.array([[0, request.seed]], jnp.uint32),
    )

    @jax.jit
    def next_id(tokens: jax.Array, position: jax.Array) -> jax.Array:
        """Return the token at `position`, by a dense causal forward over all of `tokens` [1, C]."""
        hidden, _ = dense_hidden(TARGET, params, tokens)
        last = jax.lax.dynamic_slice_in_dim(hidden, position - 1, 1, axis=1)
        return choose(
            logits_of(last, params["lm_head"]["kernel"]),
            sampling,
            positions=position[None, None],
            token_ids=jnp.arange(TARGET.vocab_size),
            filtered=False,
            shard=Shard(),
            ops=OPS["xla"],
        )[0, 0]

    ids = list(request.prompt_ids) + [0] * num_new
    for position in range(length, length + num_new):
        ids[position] = int(next_id(jnp.asarray(ids)[None], jnp.int32(position)))
    assert tuple(ids[length:]) == plain_ids(request)


def test_poison_in_everything_nobody_wrote_changes_no_token() -> None:
    """NaN in both pools and in the draft's hidden, and -1 in the dummy row, are never read."""
    requests = six_requests()
    expected = [plain_ids(request) for request in requests]
    compiled = tree_engine()
    runner = compiled.runner(dial=dial_for(requests, expected))
    poisoned = poison(runner)
    view = ViewRunner(poisoned, compiled.limits)
    assert asyncio.run(_all_ids(view, requests)) == expected


def poison(runner: DeviceRunner) -> DeviceRunner:
    """Fill pools and hidden with NaN, and every id that is not set with -1."""

    def spoil(x: jax.Array) -> jax.Array:
        return x if x.dtype != jnp.float32 else jnp.full_like(x, jnp.nan)

    state = runner.state
    rows = dataclasses.replace(
        state.rows,
        root_ids=jnp.full_like(state.rows.root_ids, -1),
        seen=jax.tree.map(lambda x: jnp.full_like(x, -7), state.rows.seen),
        prompt_lens=jnp.full_like(state.rows.prompt_lens, -1),
        sampling=jax.tree.map(spoil, state.rows.sampling),
    )
    spoiled = dataclasses.replace(
        state,
        kv=jax.tree.map(spoil, state.kv),
        draft_kv=jax.tree.map(spoil, state.draft_kv),
        draft=jax.tree.map(spoil, state.draft),
        rows=rows,
    )
    runner.replace_state(jax.device_put(spoiled, jax.tree.map(lambda x: x.sharding, state)))
    return runner


async def _all_ids(view: ViewRunner, requests: list[Request]) -> list[tuple[int, ...]]:
    loop = EngineLoop(Scheduler(view.limits, make_stream=FakeTextStream.for_request), view)
    streams = loop.submit(requests)
    out = [tuple([i async for chunk in s for i in chunk.new_ids]) for s in streams]
    await loop.close()
    return out


def test_no_program_copies_a_pool() -> None:
    for compiled in (tree_engine(), plain_engine()):
        state = compiled.runner().state
        shapes = {x.shape for x in (*state.kv, *state.draft_kv)}
        for key, executable in compiled.executables.items():
            text = executable.as_text()
            for shape in shapes:
                assert any(str(n) in text for n in shape)
                assert pool_copies(text, shape) == [], key


def test_the_search_for_copies_finds_one() -> None:
    """A step that keeps its input alive must copy the pool; the search has to find the copy."""
    pool = jnp.zeros((9, 4, 4, 8))
    kept = jax.jit(lambda x: (x, x.at[1, 0].set(1.0))).lower(pool).compile()
    assert pool_copies(kept.as_text(), pool.shape)


def test_the_state_is_donated() -> None:
    runner = tree_engine().runner()
    before = runner.state
    view = ViewRunner(runner, tree_engine().limits)
    asyncio.run(_all_ids(view, six_requests()[:1]))
    assert all(x.is_deleted() for x in (*before.kv, *before.draft_kv))


def test_nothing_compiles_and_nothing_crosses_by_accident_after_warm_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = tree_engine()
    requests = six_requests()
    serve(compiled, requests)  # warm-up of everything on the host's side
    view = ViewRunner(compiled.runner(), compiled.limits)
    with (
        jax.log_compiles(),
        caplog.at_level(logging.WARNING, logger="jax"),
        jax.transfer_guard_device_to_host("disallow"),
        jax.transfer_guard_host_to_device("disallow"),
    ):
        asyncio.run(_all_ids(view, requests))
    assert [record.message for record in caplog.records if "ompil" in record.message] == []


def test_endings_and_slot_reuse_with_steps_in_flight_change_nothing() -> None:
    """Two slots for six requests: each slot gets a new tenant while a step of the old is in
    flight."""
    requests = six_requests()
    expected = [plain_ids(request) for request in requests]
    dial = dial_for(requests, expected)
    alone = [serve(tree_engine(), [request], overlap_depth=0, dial=dial) for request in requests]
    served = serve(tree_engine(), requests, overlap_depth=3, num_slots=2, dial=dial)
    assert list(served.ids) == expected
    assert served.per_request == tuple(run.per_request[0] for run in alone)
    assert served.num_leaked_pages == 0
    assert served.num_free_pages == tree_engine().limits.pool.num_pages
