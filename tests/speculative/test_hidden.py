"""Hidden states equal those of one dense forward over the whole text, whatever was drafted."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm
from jspec.engine.programs.compilation import compile_all, lower
from jspec.engine.programs.program_keys import programs_on_demand
from jspec.engine.runner import init_state
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.transfer import shape_of
from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from jspec.messages.step_options import ALL, PLAIN
from jspec.spec.hidden_rows import HiddenRows
from jspec.speculative.hidden import hidden_bits, rows_of
from tests.models.dense_forward import dense_forward
from tests.speculative.engines import (
    TARGET,
    Compiled,
    Served,
    ViewRunner,
    build,
    dial_for,
    make_request,
    mesh_of,
    plain_ids,
    serve,
    serve_view,
    spec_of,
    tiny_params,
    with_prefix_cache,
)
from tests.support.fake_grammar import FakeGrammar
from tests.support.flat_limits import with_limits

TOLERANCE = 1e-4
END = 5
WIDTH = 128
SHAPES = {
    "tree": spec_of(2, 2, 5),
    "ngram": spec_of(3, 2, 6, Algorithm.NGRAM),
}
# (prompt length, sampling): the second requests no hidden states.
ASKED: tuple[tuple[int, dict[str, Any]], ...] = (
    (19, {}),
    (11, {"return_hidden_states": False}),
    (23, {"temperature": 0.0, "return_logprob": True, "logprob_start_len": 4}),
    (9, {"top_k": 8, "frequency_penalty": 1.5}),
    (30, {"max_new_tokens": 0}),
)


def requests() -> list[Request]:
    return [
        make_request(
            i,
            prompt_len=length,
            seed=170 + i,
            **{"max_new_tokens": 12, "return_hidden_states": True} | own,
        )
        for i, (length, own) in enumerate(ASKED)
    ]


def constrained() -> Request:
    request = make_request(5, prompt_len=14, seed=180, regex="by ids", max_new_tokens=12)
    grammar = FakeGrammar(TARGET.vocab_size, END, least=4, most=9)
    return dataclasses.replace(request, grammar=grammar, eos_token_ids=(END,))


@functools.cache
def compiled(name: str, *, beside_grammars: bool = False) -> Compiled:
    """Return an engine with the programs that are made on demand."""
    options = requests()[0].sampling.options
    if beside_grammars:
        options = options.union((constrained().sampling.options,))
    own = build(SHAPES[name], page_size=4, variants=(ALL,))
    hidden = HiddenRows(TARGET.hidden_size)
    limits = with_limits(own.limits, hidden=hidden, vocab_size=TARGET.vocab_size)
    more = compile_all(
        own.program,
        limits,
        mesh=mesh_of(1),
        params=own.params,
        state=init_state(own.program, limits, shards=1, kv_dtype=jnp.float32),
        keys=programs_on_demand(limits, options),
    )
    return dataclasses.replace(own, limits=limits, executables={**own.executables, **more})


@functools.cache
def _dense() -> Any:
    params = tiny_params()[0]
    return jax.jit(lambda ids: dense_forward(TARGET, params, ids, aux_layer_ids=())[1])


def rescored(ids: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros(WIDTH, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(_dense()(jnp.asarray(padded)))[: len(ids)]


def check(request: Request, ids: tuple[int, ...], found: tuple[np.ndarray, ...]) -> None:
    if not request.sampling.return_hidden_states:
        assert found == ()
        return
    assert len(found) == max(len(ids), 1)
    expected = rescored(request.prompt_ids + ids[:-1])
    num_prompt = len(request.prompt_ids)
    assert found[0].shape == (num_prompt, TARGET.hidden_size)
    np.testing.assert_allclose(
        np.concatenate([found[0], *(x[None] for x in found[1:])]), expected, atol=TOLERANCE
    )


def without(request: Request) -> tuple[int, ...]:
    plain = dataclasses.replace(
        request.sampling, return_hidden_states=False, return_logprob=False, logprob_start_len=-1
    )
    return plain_ids(dataclasses.replace(request, sampling=plain))


@pytest.mark.parametrize(
    ("name", "chunk_size", "depth"),
    [
        pytest.param("tree", 7, 1, marks=pytest.mark.slow),
        pytest.param("ngram", 8, 2, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_they_equal_a_dense_forward(name: str, chunk_size: int, depth: int) -> None:
    asked = requests()
    dial = None
    if SHAPES[name].algorithm is Algorithm.EAGLE3:
        dial = dial_for(asked, [without(request) for request in asked])
    served = serve(compiled(name), asked, chunk_size=chunk_size, overlap_depth=depth, dial=dial)
    assert served.num_leaked_pages == 0
    assert dial is None or max(map(max, filter(None, served.accepted))) >= 2
    for i, request in enumerate(asked):
        assert served.ids[i] == without(request)
        check(request, served.ids[i], served.hidden_states[i])
    assert len(served.logprobs[2]) == 12  # both of one row


@pytest.mark.slow
def test_those_of_a_prompt_are_whole_although_it_is_cached() -> None:
    engine = with_prefix_cache(compiled("tree"))
    asked = requests()[:4]
    view = ViewRunner(engine.runner(), with_limits(engine.limits, prefill_buckets=(8,)))
    for wave in range(2):
        again = [dataclasses.replace(r, request_id=f"{r.request_id}.{wave}") for r in asked]
        served = asyncio.run(serve_view(view, again))
        for i, request in enumerate(asked):
            assert served.ids[i] == without(request)
            check(request, served.ids[i], served.hidden_states[i])


@pytest.mark.slow
def test_a_retracted_row_says_nothing_twice() -> None:
    asked = [
        make_request(
            i, prompt_len=9 + 3 * i, seed=190 + i, max_new_tokens=100, return_hidden_states=True
        )
        for i in range(3)
    ]
    served = serve(compiled("tree"), asked, num_pages=48)
    assert served.num_retractions
    for i, request in enumerate(asked):
        assert served.ids[i] == without(request)
        check(request, served.ids[i], served.hidden_states[i])


@pytest.mark.slow
def test_they_stand_beside_rows_with_a_grammar() -> None:
    engine = compiled("tree", beside_grammars=True)
    alone: Served = serve(engine, [constrained()])
    both = dataclasses.replace(
        constrained(),
        request_id="r6",
        sampling=dataclasses.replace(constrained().sampling, return_hidden_states=True),
    )
    asked = [requests()[0], constrained(), both]
    served = serve(engine, asked, chunk_size=8)
    assert served.ids[1:] == alone.ids * 2
    for i, request in enumerate(asked):
        check(request, served.ids[i], served.hidden_states[i])


@pytest.mark.slow
def test_programs_without_the_feature_hold_nothing_of_it() -> None:
    """And those that have it output the path's rows alone, not the nodes'."""
    engine = compiled("tree")
    options = requests()[0].sampling.options

    def out_of(asked: Any) -> tuple[int, ...]:
        key = ProgramKey(StepKind.DECODE, 8, asked)
        program = dataclasses.replace(engine.program, options=asked)
        state = init_state(program, engine.limits, shards=1, kv_dtype=jnp.float32)
        shape = shape_of(key, engine.limits)
        lowered = lower(shape, program, mesh=mesh_of(1), params=engine.params, state=state)
        ranks, *found = lowered.out_info[1].shape
        assert ranks == 1
        return tuple(found)

    most = engine.limits.draft_shape.max_emitted
    assert out_of(PLAIN) == (8, 1 + most)
    assert out_of(options) == (8, 1 + most + most * TARGET.hidden_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_travels_bit_by_bit(dtype: str) -> None:
    rows = jax.random.normal(jax.random.key(0), (2, 3, 6)).astype(dtype)
    bits = np.asarray(hidden_bits(rows))
    assert bits.shape == (2, 3, 3 if dtype == "bfloat16" else 6)
    found = rows_of(rows).floats(bits)
    np.testing.assert_array_equal(found, np.asarray(rows.astype(jnp.float32)))
    assert rows_of(rows) == HiddenRows.of(6, dtype)
    odd = rows[..., :5]
    np.testing.assert_array_equal(
        rows_of(odd).floats(np.asarray(hidden_bits(odd))), np.asarray(odd.astype(jnp.float32))
    )
