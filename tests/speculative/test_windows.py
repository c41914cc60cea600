"""A target with windows in some layers frees their pages, and writes the same text.

The oracle is a dense forward over the whole text with the windows as masks: no cache, no pages.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm, ServeLimits, WindowSpace
from jspec.engine.programs.compilation import compile_all
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.runner import init_state
from jspec.engine.weights.loading import place
from jspec.layers.linear import Shard
from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from jspec.messages.step_options import PLAIN
from jspec.models.decoder import Decoder
from jspec.models.heads.feature_head import FeatureHead
from jspec.pallas_kernels.ops import Ops
from jspec.spec.axes import MODEL
from jspec.spec.model_spec import ModelSpec
from jspec.speculative.drafter import Drafter, NoDrafter
from jspec.speculative.drafters.ranked import StandaloneDrafter
from jspec.speculative.step import StepProgram
from tests.models.dense_forward import dense_hidden
from tests.models.test_families import attend_of
from tests.speculative.engines import (
    CONTEXT,
    DIAL_ACCEPTANCE,
    DRAFT,
    NUM_SLOTS,
    TARGET,
    Compiled,
    Served,
    dial_for,
    limits_of,
    make_request,
    mesh_of,
    serve,
    spec_of,
    tiny_params,
)
from tests.speculative.test_prefix_cache import Session, accepted_by, ids_of, next_turn
from tests.support.dial_drafter import DialDrafter, dial_head, dial_params
from tests.support.flat_limits import with_limits

PREFILL = StepKind.PREFILL
WINDOW, PAGE, NUM_TOKENS = 8, 4, 100
SOME, ALL_LAYERS = (WINDOW, None), (WINDOW, WINDOW)
SPECS = {"plain": (0, 1, 1), "tree": (2, 2, 4), "itself": (3, 1, 4)}


def windowed(windows: tuple[int | None, ...]) -> ModelSpec:
    layers = (
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=window))
        for layer, window in zip(TARGET.layers, windows, strict=True)
    )
    return dataclasses.replace(TARGET, layers=tuple(layers))


def with_space(limits: ServeLimits, *, num_rows: int) -> ServeLimits:
    """Return limits with window pages for that many rows and no more."""
    each = limits.window_pages_per_row(WINDOW)
    num_pages = num_rows * each + limits.pages_of_chunks(limits.programs.chunk_size)
    return with_limits(limits, windows=(WindowSpace(WINDOW, num_pages),))


@functools.cache
def engine(name: str, windows: tuple[int | None, ...]) -> Compiled:
    """Return the smallest pool that serves two rows at once, with plain programs only.

    itself: the target is its own STANDALONE draft, with the same windows.
    """
    is_own_draft = name == "itself"
    spec = spec_of(*SPECS[name], *([Algorithm.STANDALONE] if is_own_draft else []))
    has_model = spec.algorithm is not Algorithm.NONE
    mesh, shard, ops = mesh_of(1), Shard(1, MODEL), Ops()
    target_params, head_params = tiny_params()
    target = Decoder(windowed(windows), ops, shard, DRAFT.aux_layer_ids if name == "tree" else ())
    drafter: Drafter = NoDrafter()
    draft_params: Any = {}
    if is_own_draft:
        drafter, draft_params = StandaloneDrafter(target, spec), target_params
    elif has_model:
        head = FeatureHead(DRAFT, ops, shard)
        drafter = DialDrafter(dial_head(head), spec, acceptance=DIAL_ACCEPTANCE)
        empty = dial_params({0: (0,)}, rows=NUM_SLOTS, width=CONTEXT)
        draft_params = {"head": head_params, "dial": empty}
    program = StepProgram(target=target, drafter=drafter, draft_shape=spec)
    limits = with_space(limits_of(spec, page_size=PAGE), num_rows=2)
    limits = with_limits(limits, prefix_cache=True)
    params = place(mesh, program.tables, {"target": target_params, "draft": draft_params})
    executables = compile_all(
        program,
        limits,
        mesh=mesh,
        params=params,
        state=init_state(program, limits, shards=1, kv_dtype=jnp.float32),
        keys=tuple(
            key
            for key in program_keys(limits)
            if key.kind is StepKind.PREFILL or key.options == PLAIN
        ),
    )
    return Compiled(limits=limits, program=program, params=params, executables=executables)


@functools.cache
def dense_ids(windows: tuple[int | None, ...]) -> list[tuple[int, ...]]:
    """Return NUM_TOKENS greedy tokens of each request, each from a dense forward over all before
    it."""
    spec, (params, _) = windowed(windows), tiny_params()
    prompts = [request.prompt_ids for request in requests()]
    lens = jnp.asarray([len(prompt) for prompt in prompts])
    ids = np.zeros((len(prompts), max(map(len, prompts)) + NUM_TOKENS), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt

    def write_next(i: int, ids: jax.Array) -> jax.Array:
        hidden, _ = dense_hidden(spec, params, ids, attend_of=attend_of)
        rows, ends = jnp.arange(len(prompts)), lens + i
        logits = hidden[rows, ends - 1] @ params["lm_head"]["kernel"]
        return ids.at[rows, ends].set(jnp.argmax(logits, axis=-1).astype(jnp.int32))

    done = np.asarray(jax.jit(partial(jax.lax.fori_loop, 0, NUM_TOKENS, write_next))(ids))
    texts = zip(done.tolist(), prompts, strict=True)
    return [tuple(row[len(prompt) :][:NUM_TOKENS]) for row, prompt in texts]


def requests() -> list[Request]:
    """Return prompts of three chunks and of one; three rows, of which two fit at once."""
    return [
        make_request(i, prompt_len=n, seed=i, temperature=0.0, max_new_tokens=NUM_TOKENS)
        for i, n in enumerate((37, 5, 20))
    ]


def run(name: str, windows: tuple[int | None, ...], **how: Any) -> Served:
    compiled, asked = engine(name, windows), requests()
    expected = dense_ids(windows)
    dial = dial_for(asked, expected) if name == "tree" else None
    served = serve(compiled, asked, dial=dial, **how)
    assert list(served.ids) == expected
    (space,) = compiled.limits.pool.windows
    assert served.num_free_window_pages == (space.num_pages,)
    assert (served.num_leaked_pages, served.num_free_pages) == (0, compiled.limits.pool.num_pages)
    return served


@pytest.mark.parametrize(
    ("name", "windows", "depth", "chunk"),
    [
        ("plain", ALL_LAYERS, 2, 8),
        pytest.param("tree", SOME, 2, 8, marks=pytest.mark.slow),
        pytest.param("tree", SOME, 0, 32, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_the_text_is_that_of_a_dense_forward(
    name: str, windows: tuple[int | None, ...], depth: int, chunk: int
) -> None:
    """The pool is too small for the whole text of a single row."""
    served = run(name, windows, overlap_depth=depth, chunk_size=chunk)
    (space,) = engine(name, windows).limits.pool.windows
    assert space.num_pages * PAGE < 2 * NUM_TOKENS
    if name != "plain":
        assert len({n for accepted in served.accepted for n in accepted}) > 1


@pytest.mark.slow
def test_a_draft_with_windows_reads_its_own_pages() -> None:
    """A target that drafts for itself is always right, except where a row's end cuts.

    This holds also after the prompt of 20 tokens, which ends at a page's edge: the page of the
    root's slot, which the draft writes at once, is granted with the last chunk.
    """
    served = run("itself", SOME, overlap_depth=1, chunk_size=8)
    assert all(set(accepted[:-1]) == {3} for accepted in served.accepted)


def test_a_next_turn_begins_after_the_first_and_says_the_same() -> None:
    """In the same few pages; `test_window_cache.py` has more cases."""
    compiled, prompt_len = engine("plain", ALL_LAYERS), 37
    first = make_request(0, prompt_len=prompt_len, seed=0, temperature=0.0, max_new_tokens=30)
    warm = Session(compiled, chunk_size=8, overlap_depth=2)
    again = next_turn(first, ids_of(warm.serve([first])[0]), turn=0)
    again = dataclasses.replace(again, sampling=first.sampling)
    cold = Session(compiled, chunk_size=8, overlap_depth=2, prefix_cache=False)
    served, expected = warm.serve([again])[0], cold.serve([again])[0]
    assert ids_of(served) == ids_of(expected)
    assert accepted_by(served) == accepted_by(expected)
    ahead = compiled.limits.draft_shape.tokens_ahead
    assert served[-1].cached_tokens == (prompt_len + 30 - 1 - ahead) // PAGE * PAGE
    assert expected[-1].cached_tokens == 0
    (space,) = compiled.limits.pool.windows
    assert warm.scheduler.stats.num_free_window_pages == (space.num_pages,)


def test_the_windows_are_felt() -> None:
    assert dense_ids(SOME) != dense_ids(ALL_LAYERS)
