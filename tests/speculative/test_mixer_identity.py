"""Speculative decoding equals plain decoding for layers with latent attention and delta nets.

Through scheduler, loop and the real runner, in float32: chains and trees, pages and chunks of
several sizes, rounds, and retraction. test_state_snapshots.py has smaller shapes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm
from jspec.engine.runner import init_state
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.decoder import Decoder
from jspec.models.layer import Params
from jspec.speculative.drafters.ranked import StandaloneDrafter
from tests.engine.pool_copies import pool_copies
from tests.speculative.engines import (
    PLAIN,
    Compiled,
    build,
    dial_for,
    make_request,
    serve,
    spec_of,
    tiny_params,
)
from tests.speculative.family_targets import drawn
from tests.speculative.law_engines import requests_of as many_requests
from tests.speculative.mixer_targets import MIXER_TARGETS

NEW_TOKENS = 40


@dataclass(frozen=True)
class Case:
    target: str
    shape: tuple[int, int, int]
    page_size: int
    chunk: int
    rounds: int = 1

    def __str__(self) -> str:
        shape = "-".join(map(str, self.shape))
        return f"{self.target}_{shape}_p{self.page_size}_c{self.chunk}"


CHAIN = Case("hybrid", (3, 1, 4), page_size=16, chunk=8, rounds=2)
LATENT = Case("latent", (3, 3, 10), page_size=4, chunk=8)
SPARSE = Case("sparse_fp8", (2, 2, 7), page_size=4, chunk=7)
# A lookup's trees on two shards are test_state_snapshots.py's. Sparse latents contain dense ones,
# which test_latent_engine.py also drafts with; all kinds are in test_mixer_engine.py.
SLOW = (CHAIN, SPARSE)
BY_HAND = (
    Case("sparse", (3, 3, 10), page_size=4, chunk=8),
    Case("all_kinds_fp8", (2, 2, 7), page_size=4, chunk=7),
    LATENT,
    Case("latent", (3, 1, 4), page_size=1, chunk=32, rounds=2),
    Case("sparse", (3, 1, 4), page_size=1, chunk=32, rounds=2),
)
EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


@functools.cache
def params_of(target: str) -> Params:
    return drawn(MIXER_TARGETS[target])


@functools.cache
def plain_engine(target: str) -> Compiled:
    return build(
        PLAIN,
        page_size=16,
        variants=(StepOptions(),),
        params=(params_of(target), {}),
        target_spec=MIXER_TARGETS[target],
    )


def requests_of(temperature: float) -> list[Request]:
    return [
        make_request(
            i,
            prompt_len=length,
            seed=i + 70,
            temperature=temperature,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
        )
        for i, length in enumerate((29, 2, 18))
    ]


@functools.cache
def plain_texts(target: str, temperature: float) -> list[tuple[int, ...]]:
    texts = [
        serve(plain_engine(target), [request], overlap_depth=0).ids[0]
        for request in requests_of(temperature)
    ]
    assert len(set(texts)) == 3
    return texts


@functools.cache
def engine(case: Case) -> Compiled:
    target = MIXER_TARGETS[case.target]
    return build(
        spec_of(*case.shape),
        page_size=case.page_size,
        num_rounds=case.rounds,
        variants=(StepOptions(),),
        params=(params_of(case.target), tiny_params()[1]),
        target_spec=target,
    )


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(case, id=str(case), marks=EXHAUSTIVE) for case in BY_HAND),
    ],
)
def test_speculative_equals_plain(case: Case) -> None:
    compiled = engine(case)
    histogram = np.zeros(case.shape[0] + 1, int)
    for temperature in (0.0, 1.0):
        requests, expected = requests_of(temperature), plain_texts(case.target, temperature)
        dial = dial_for(requests, expected)
        served = serve(compiled, requests, chunk_size=case.chunk, dial=dial)
        assert list(served.ids) == expected
        assert served.num_leaked_pages == 0
        histogram += np.asarray(served.counters.accept_histogram)
    assert histogram.all(), histogram


@pytest.mark.parametrize(
    ("case", "num_pages"),
    [
        pytest.param(CHAIN, 20, marks=pytest.mark.slow),
        pytest.param(SPARSE, 80, marks=pytest.mark.slow),
        pytest.param(LATENT, 80, marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_retracted_rows_start_again(case: Case, num_pages: int) -> None:
    """Their states are computed again from zero, in slots that other rows had."""
    requests = many_requests(8, num_tokens=90, seed=300, temperature=1.0)
    expected = serve(plain_engine(case.target), requests, overlap_depth=0).ids
    dial = dial_for(requests, list(expected))
    served = serve(engine(case), requests, num_pages=num_pages, dial=dial)
    assert served.num_retractions > 0
    assert served.ids == expected


@pytest.mark.slow
@pytest.mark.exhaustive  # test_latent_engine.py has a layer of latents that drafts
def test_a_draft_with_latent_attention() -> None:
    """The target drafts for itself, so that every path is accepted whole."""
    target, spec = MIXER_TARGETS["latent"], spec_of(2, 2, 7, Algorithm.STANDALONE)
    params = params_of("latent")
    compiled = build(
        spec,
        page_size=4,
        variants=(StepOptions(),),
        params=(params, params),
        target_spec=target,
        make=lambda ops, shard: StandaloneDrafter(Decoder(target, ops, shard), spec),
    )
    served = serve(compiled, requests_of(1.0), chunk_size=8)
    assert list(served.ids) == plain_texts("latent", 1.0)
    counts = served.counters.accept_histogram
    assert counts[-1] == sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_shapes"), [(CHAIN, 4), (SPARSE, 2)], ids=str)
def test_no_program_copies_a_cache(case: Case, num_shapes: int) -> None:
    """A row's state is read, and written in place. A CPU converts FP8 where a chip reads it."""
    compiled = engine(case)
    state = init_state(compiled.program, compiled.limits, shards=1, kv_dtype=jnp.float32)
    shapes = {x.shape for x in jax.tree.leaves(state.kv) if x.ndim > 2}
    assert len(shapes) == num_shapes
    for key, executable in compiled.executables.items():
        text = executable.as_text()
        lines = [line for shape in shapes for line in pool_copies(text, shape)]
        assert not [line for line in lines if " convert(" not in line], key
