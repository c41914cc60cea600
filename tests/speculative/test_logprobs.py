"""Log-probabilities equal those of one dense forward over the whole text, whatever was drafted.

The reference runs the model without pages, chunks, batches or shards, and takes log_softmax in
float64. Other rows of the same batches request other options, or none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm
from jspec.engine.programs.compilation import lower
from jspec.engine.runner import init_state
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.transfer import shape_of
from jspec.layers.linear import Shard
from jspec.messages.plan import StepKind
from jspec.messages.request import PromptToken, Request, TokenLogprob
from jspec.messages.step_options import ALL, PLAIN, StepOptions
from jspec.models.files.checkpoint import load_target, save_target
from jspec.models.heads.eagle3 import load_eagle3, save_eagle3
from jspec.models.layer import Params
from jspec.sampling.logprobs import Logprobs, logprobs_of
from jspec.speculative import logprobs as step_logprobs
from tests.speculative.engines import (
    DRAFT,
    TARGET,
    Compiled,
    ViewRunner,
    build,
    dense_logits,
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
from tests.support.flat_limits import with_limits

TOLERANCE = 1e-4
WATCHED = (3, 300, 7)
# (prompt length, sampling): the second requests none, the others different parts.
ASKED: tuple[tuple[int, dict[str, Any]], ...] = (
    (19, {"logprob_start_len": 0, "top_logprobs_num": 5, "token_ids_logprob": WATCHED}),
    (11, {"return_logprob": False}),
    (23, {"logprob_start_len": 17, "temperature": 0.0, "top_logprobs_num": 20}),
    (9, {"top_k": 8, "frequency_penalty": 1.5, "repetition_penalty": 1.3}),
    (13, {"logprob_start_len": 30, "logit_bias": ((5, 4.0), (9, -100.0)), "min_p": 0.02}),
    (30, {"logprob_start_len": 1, "max_new_tokens": 0, "top_logprobs_num": 2}),
)
SHAPES = {
    "tree": spec_of(2, 2, 5),
    "ngram": spec_of(3, 2, 6, Algorithm.NGRAM),
}


def requests() -> list[Request]:
    return [
        make_request(
            i,
            prompt_len=length,
            seed=70 + i,
            **{"max_new_tokens": 12, "return_logprob": True} | own,
        )
        for i, (length, own) in enumerate(ASKED)
    ]


@functools.cache
def params_for(shards: int) -> tuple[Params, Params]:
    """Return tiny_params sharded for `shards`, like reading a checkpoint does."""
    target, head = tiny_params()
    with tempfile.TemporaryDirectory() as directory:
        paths = Path(directory, "target"), Path(directory, "draft")
        save_target(paths[0], TARGET, target, dtype=np.float32)
        save_eagle3(paths[1], DRAFT, head, dtype=np.float32, include_embed=True)
        target = load_target(paths[0], TARGET, dtype=np.float32, shards=shards)
        return target, load_eagle3(
            paths[1], DRAFT, target_params=target, dtype=np.float32, shards=shards
        )


@functools.cache
def compiled(name: str, shards: int = 1) -> Compiled:
    """Return an engine with the dial, which is mostly right."""
    return build(
        SHAPES[name], page_size=4, variants=(ALL,), shards=shards, params=params_for(shards)
    )


@functools.cache
def rescored(ids: tuple[int, ...]) -> np.ndarray:
    """Return f64[T, V]: log-probabilities of the token after each of ids."""
    exact = dense_logits(ids).astype(np.float64)
    top = exact.max(axis=-1, keepdims=True)
    return exact - top - np.log(np.exp(exact - top).sum(axis=-1, keepdims=True))


def without_logprobs(request: Request) -> tuple[int, ...]:
    """Return plain decoding's output without this option."""
    sampling = dataclasses.replace(request.sampling, return_logprob=False)
    return plain_ids(dataclasses.replace(request, sampling=sampling))


def check_token(
    known: TokenLogprob | None, token_id: int, expected: np.ndarray, request: Request
) -> None:
    """Check that `known` equals `expected`, f64[V], at token_id."""
    assert known is not None
    sampling = request.sampling
    assert known.logprob == pytest.approx(expected[token_id], abs=TOLERANCE)
    assert len(known.top) == sampling.top_logprobs_num
    best = np.sort(expected)[::-1][: len(known.top)]
    np.testing.assert_allclose([value for value, _ in known.top], best, atol=TOLERANCE)
    of_ids = expected[[token for _, token in known.top]]
    np.testing.assert_allclose([value for value, _ in known.top], of_ids, atol=TOLERANCE)
    watched = expected[list(sampling.token_ids_logprob)]
    np.testing.assert_allclose(known.watched, watched, atol=TOLERANCE)


def check_all(
    request: Request,
    ids: tuple[int, ...],
    of_output: tuple[TokenLogprob, ...],
    of_prompt: tuple[PromptToken, ...],
) -> None:
    sampling, prompt = request.sampling, request.prompt_ids
    if not sampling.return_logprob:
        assert (of_output, of_prompt) == ((), ())
        return
    expected = rescored(prompt + ids)
    assert len(of_output) == len(ids)
    for i, known in enumerate(of_output):
        check_token(known, ids[i], expected[len(prompt) + i - 1], request)
    start = sampling.logprob_start_len if sampling.logprob_start_len >= 0 else len(prompt)
    assert [token_id for token_id, _ in of_prompt] == list(prompt[start:])
    for position, (token_id, of_token) in enumerate(of_prompt, start=start):
        if position == 0:
            assert of_token is None
        else:
            check_token(of_token, token_id, expected[position - 1], request)


@pytest.mark.parametrize(
    ("name", "shards", "chunk_size", "depth"),
    [
        ("tree", 2, 7, 1),
        pytest.param("ngram", 1, 8, 2, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_they_equal_a_dense_forward(name: str, shards: int, chunk_size: int, depth: int) -> None:
    asked = requests()
    dial = None
    if SHAPES[name].algorithm is Algorithm.EAGLE3:
        dial = dial_for(asked, [without_logprobs(request) for request in asked])
    engine = compiled(name, shards)
    served = serve(engine, asked, chunk_size=chunk_size, overlap_depth=depth, dial=dial)
    assert served.num_leaked_pages == 0
    assert dial is None or max(map(max, filter(None, served.accepted))) >= 2
    for i, request in enumerate(asked):
        assert served.ids[i] == without_logprobs(request)
        check_all(request, served.ids[i], served.logprobs[i], served.prompt_logprobs[i])
    assert served.ids[-1] == ()


def test_those_of_a_prompt_are_whole_although_it_is_cached() -> None:
    """Equal prompts come again: their cached prefix ends early enough."""
    engine = with_prefix_cache(compiled("tree", 2))
    asked = requests()
    view = ViewRunner(engine.runner(), with_limits(engine.limits, prefill_buckets=(8,)))
    for wave in range(2):
        again = [dataclasses.replace(r, request_id=f"{r.request_id}.{wave}") for r in asked]
        served = asyncio.run(serve_view(view, again))
        for i, request in enumerate(asked):
            assert served.ids[i] == without_logprobs(request)
            check_all(request, served.ids[i], served.logprobs[i], served.prompt_logprobs[i])
    assert not served.num_leaked_pages


@pytest.mark.slow
def test_shards_agree_with_the_whole_bit_by_bit_on_ids() -> None:
    """The lowest id comes first among equals, also across shards; a short vocabulary is padded."""
    logits = np.random.default_rng(5).integers(0, 4, (3, 48)).astype(np.float32)
    chosen = jnp.asarray([0, 25, 47])
    watched = jnp.asarray([[24, 48, 1], [2, 3, -1], [47, 47, 47]])

    def reduced(logits: jax.Array, first: jax.Array, shard: Shard) -> Logprobs:
        ids = first + jnp.arange(logits.shape[1], dtype=jnp.int32)
        return logprobs_of(logits, chosen, watched, token_ids=ids, shard=shard)

    whole = reduced(jnp.asarray(logits), jnp.int32(0), Shard())
    parts = jax.vmap(functools.partial(reduced, shard=Shard(2, "tensor")), axis_name="tensor")(
        jnp.asarray(logits).reshape(3, 2, 24).swapaxes(0, 1), jnp.asarray([0, 24], jnp.int32)
    )
    for name, array in vars(whole).items():
        for part in getattr(parts, name):
            np.testing.assert_allclose(part, array, rtol=1e-6)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(whole.top_ids, order)
    assert whole.watched_logprobs[0, 1] == 0.0
    short = reduced(jnp.asarray(logits[:, :6]), jnp.int32(0), Shard())
    assert np.isneginf(short.top_logprobs[:, 6:]).all()


def text_of(options: StepOptions) -> str:
    """Return the lowered decode program of the tree."""
    engine = compiled("tree", 2)
    shape = shape_of(ProgramKey(StepKind.DECODE, 8, options), engine.limits)
    program = dataclasses.replace(engine.program, options=options)
    state = init_state(program, engine.limits, shards=2, kv_dtype=jnp.float32)
    return lower(shape, program, mesh=mesh_of(2), params=engine.params, state=state).as_text()


def test_programs_without_the_feature_do_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their text is the same without the reducing code, and has none of its shapes."""
    plain, full = text_of(PLAIN), text_of(ALL)

    def never(*_: Any) -> Any:
        raise AssertionError("called")

    monkeypatch.setattr("jspec.speculative.outputs.emitted_logprobs", never)
    assert text_of(PLAIN) == plain
    with pytest.raises(AssertionError, match="called"):
        text_of(ALL)
    assert "x20xf32" in full
    assert "x20xf32" not in plain


def test_no_array_is_as_large_as_the_logits_but_them() -> None:
    """No array is [B, M, V] or [T, V]: a depth, or a slice of a prompt, is reduced at a time."""
    assert step_logprobs.SLICE == 64
    engine = compiled("tree", 2)
    slots, nodes, width = 8, engine.limits.draft_shape.num_draft_tokens, TARGET.vocab_size // 2
    most = engine.limits.draft_shape.max_emitted
    text = text_of(ALL)
    assert f"tensor<{slots}x{nodes}x{width}xf32>" in text
    assert f"tensor<{slots}x{most}x{width}xf32>" not in text
    assert f"tensor<{most}x{slots}x{width}xf32>" not in text
