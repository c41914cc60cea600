"""Laws of layers with another kind of cache, against the definition in float64.

chunks       a prompt gives the same in any chunks
commit       after a chain or a tree, and any accepted path, the next step reads that path alone
tenants      a slot's or a page's next row reads nothing of the last one
padding      NaN in padding, in rows without a request and in unwritten memory changes nothing
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.models.decoder_params import mixer_params
from jspec.models.files.stored.tensors import value_at
from jspec.models.params import Init
from jspec.models.placement import init_params, nested
from jspec.pallas_kernels.delta_rule import reference
from jspec.pallas_kernels.delta_rule.reference import CARRIED, load_snapshots, save_snapshots
from jspec.pallas_kernels.ops import Ops, ReferenceOps
from jspec.spec.layers.attention import IndexerSpec, LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.model_spec import Mixer
from tests.layers.mixer_reference import delta_reference, latent_reference
from tests.layers.mixer_rows import (
    CHUNK,
    LENGTH,
    NUM_PATH,
    NUM_ROWS,
    SIZE,
    Mixed,
    Reference,
    Rows,
    run,
)

SPECS: dict[str, tuple[Mixer, Reference]] = {
    "latent": (
        LatentAttentionSpec(
            num_heads=3, num_kv_heads=3, head_dim=10, v_dim=6, rotary_dim=4, kv_rank=8, q_rank=7
        ),
        latent_reference,
    ),
    "latent_full_queries": (
        LatentAttentionSpec(
            num_heads=2, num_kv_heads=2, head_dim=6, v_dim=6, rotary_dim=2, kv_rank=5, scale=0.3
        ),
        latent_reference,
    ),
    "sparse": (
        LatentAttentionSpec(
            num_heads=3,
            num_kv_heads=3,
            head_dim=10,
            v_dim=6,
            rotary_dim=4,
            kv_rank=8,
            q_rank=7,
            indexer=IndexerSpec(num_heads=3, head_dim=6, top_k=5, interleaved=True),
        ),
        latent_reference,
    ),
    "delta_net": (
        DeltaNetSpec(num_heads=4, num_key_heads=2, key_dim=6, value_dim=5),
        delta_reference,
    ),
    "delta_net_short": (
        DeltaNetSpec(num_heads=2, num_key_heads=2, key_dim=4, value_dim=4, conv_size=2),
        delta_reference,
    ),
}


@functools.cache
def mixed_of(name: str) -> Mixed:
    """Draw random weights; norms, decays and their bias differ from their initial values."""
    spec, reference = SPECS[name]
    table = mixer_params(spec, size=SIZE, sinks=())
    params = init_params(table, seed=5)
    values = {own.path: value_at(params, own.path) for own in table}
    for i, own in enumerate(table):
        if own.init in (Init.ZEROS, Init.ONES):
            noise = jax.random.normal(jax.random.key(i), own.shape, jnp.float32) / 2
            values[own.path] = values[own.path] + noise
    return Mixed(spec, nested(values.items())["attention"], reference)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("chunk"), st.lists(st.integers(0, 5), min_size=3, max_size=3)),
        st.tuples(st.just("chain"), st.sampled_from((1, 3))),
        st.tuples(st.just("tree"), st.just(7)),
        st.tuples(st.just("restart"), st.integers(0, NUM_ROWS - 1)),
    ),
    min_size=3,
    max_size=7,
)


@pytest.mark.slow_cases("latent]")
@pytest.mark.parametrize("name", ["latent", "delta_net"])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(steps=steps, seed=st.integers(0, 99))
def test_any_history_gives_the_definition(
    name: str, steps: list[tuple[str, object]], seed: int
) -> None:
    rows = Rows(mixed_of(name), seed=seed, page_size=1 if name == "latent" else 4)
    rows.chunk((CHUNK - 10, 1, 9))
    for kind, what in steps:
        dead = [row for row in range(NUM_ROWS) if not 0 < rows.told[row] < LENGTH - NUM_PATH]
        if kind == "restart" and isinstance(what, int):
            rows.restart(what)
        elif kind == "chunk" and isinstance(what, list):
            rows.chunk([min(n, LENGTH - told) for n, told in zip(what, rows.told, strict=True)])
        elif isinstance(what, int):
            rows.verify(what, topk=1 if kind == "chain" else 2, dead=dead)


def test_every_node_of_a_tree_selects_on_its_own_path() -> None:
    """Its output is that of a fresh sequence of its path, also if rows have few tokens."""
    rows = Rows(mixed_of("sparse"), seed=4, page_size=4)
    rows.chunk((11, 2, 3))
    rows.verify(7, topk=2)
    rows.verify(7, topk=2, dead=(1,))
    rows.restart(0)
    rows.chunk((3, 9, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latent_full_queries", "delta_net_short"])
def test_others_of_a_kind_give_the_definition(name: str) -> None:
    rows = Rows(mixed_of(name), seed=2, page_size=4)
    rows.chunk((6, 1, 9))
    rows.verify(7, topk=2)
    rows.restart(1)
    rows.chunk((0, 5, 3))
    rows.verify(7, topk=2)


@dataclass(frozen=True, slots=True)
class SmallBlocks(Ops):
    """XLA, in programs of its own: a row of the test below has several blocks."""

    name = "small blocks"


def test_prompts_of_several_blocks_give_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks are solved at once, and there are up to seven, the last ones not full."""
    monkeypatch.setattr(reference, "BLOCK_TOKENS", 3)
    monkeypatch.setattr(reference, "BLOCKS_AT_ONCE", 2)
    rows = Rows(mixed_of("delta_net"), seed=6, page_size=4, ops=SmallBlocks())
    rows.chunk((7, 1, 8))
    rows.chunk((0, 9, 4))
    rows.verify(7, topk=2)
    rows.restart(1)
    rows.chunk((4, 10, 2))
    rows.verify(7, topk=2)


def test_the_plain_definition_of_attention_serves_latents() -> None:
    rows = Rows(mixed_of("latent"), seed=1, page_size=4, ops=ReferenceOps())
    rows.chunk((5, 2, 9))
    rows.verify(7, topk=2)
    rows.verify(3, topk=1)


@pytest.mark.parametrize("nodes", [None, 4])
def test_products_of_states_are_not_rounded(nodes: int | None) -> None:
    """On TPUs and GPUs products of float32 are, unless they ask for more."""
    mixed, count = mixed_of("delta_net"), 4 * NUM_ROWS
    rows = Rows(mixed, seed=0, page_size=4)
    lens = [4] * NUM_ROWS
    told = rows._rows(lens, [0, 4, 8, 12], np.zeros(count, np.int32))
    traced = functools.partial(run, spec=mixed.spec, ops=rows.ops, nodes=nodes)
    with jax.default_matmul_precision("default"):
        given = (mixed.params, rows.cache, jnp.zeros((count, SIZE)), told)
        text = str(jax.make_jaxpr(traced)(*given))
    precisions = re.findall(r"dot_general\[[^\]]*?dimension_numbers=.*\n *precision=(.*)", text)
    exact = [precision for precision in precisions if "HIGHEST" in precision]
    assert len(exact) >= 6
    assert len(precisions) - len(exact) == 4  # the layer's projections


def test_a_row_goes_on_after_a_snapshot_of_another() -> None:
    """It is saved after a prompt and after a tree, whose accepted path is still pending."""
    rows = Rows(mixed_of("delta_net"), seed=3, page_size=4)
    pool = {name: jnp.full_like(rows.cache[name][:3], jnp.nan) for name in CARRIED}
    rows.chunk((9, 2, 5))
    lens = [rows.told[0]]
    pool = save_snapshots(pool, rows.cache, **pairs((1, 0), (1, 0)))
    rows.verify(7, topk=2)
    lens.append(rows.told[0])
    pool = save_snapshots(pool, rows.cache, **pairs((1, 0), (2, 0)))
    for entry, length in enumerate(lens, 1):
        for row in (1, 2):
            rows.restart(row)
            rows.texts[row, :length] = rows.texts[0, :length]
            rows.told[row] = length
        rows.cache = load_snapshots(rows.cache, pool, **pairs((2, 3), (entry, entry)))
        rows.chunk((0, 3, 0))
        rows.verify(7, topk=2)


def pairs(slots: tuple[int, ...], entries: tuple[int, ...]) -> dict[str, jax.Array]:
    return {
        "slots": jnp.asarray(slots, jnp.int32),
        "entries": jnp.asarray(entries, jnp.int32),
    }
