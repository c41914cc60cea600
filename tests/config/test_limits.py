"""Draft shapes, static limits and model shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import Algorithm, SpeculativeConfig, WindowSpace
from jspec.errors import ConfigError
from jspec.spec import indexing
from jspec.spec.cache_entry import KV
from jspec.spec.cache_groups import CacheGroup, groups_of_layers, page_spaces
from jspec.spec.head_spec import default_aux_layer_ids, eagle3_spec
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec, cache_groups, uniform_decoder
from tests.support.flat_limits import flat_limits, with_limits


def eagle(num_steps: int, topk: int, num_draft_tokens: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        algorithm=Algorithm.EAGLE3,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((0, 1, 1), "speculative_num_steps is 0; expected at least 1"),
        ((3, 0, 4), "speculative_eagle_topk is 0; expected at least 1"),
        ((3, 1, 5), "3/1/5: a chain .* speculative_num_draft_tokens must be 4"),
        ((2, 2, 8), r"2/2/8: the tree has K \+ \(S-1\)\*K\*K = 6 candidates.* from 2 to 7"),
        ((2, 2, 1), "2/2/1.*from 2 to 7"),
        ((1, 4, 6), "1/4/6.* = 4 candidates.*from 2 to 5"),
    ],
)
def test_impossible_trees_are_refused(spec: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        eagle(*spec)


def test_without_a_draft_model_there_is_only_the_root() -> None:
    plain = SpeculativeConfig.plain()
    assert (plain.num_steps, plain.topk, plain.num_draft_tokens) == (0, 1, 1)
    assert (plain.max_emitted, plain.num_scratch_slots) == (1, 1)
    with pytest.raises(ConfigError, match="S/K/N = 3/1/4 without a draft model; expected 0/1/1"):
        SpeculativeConfig(num_steps=3, num_draft_tokens=4)


LIMITS = flat_limits(
    draft_shape=eagle(3, 1, 4),
    num_slots=4,
    num_pages=64,
    page_size=16,
    context_length=256,
    decode_buckets=(1, 2, 4),
    prefill_buckets=(32, 64),
    prefill_rows=2,
)


def test_limits_of_the_worked_sizes() -> None:
    assert LIMITS.programs.chunk_size == 64
    # 256 tokens, one unread step of 4, scratch of 4: 264 positions.
    assert LIMITS.pages_per_row == 17
    # A step may need 8 positions, which touch at most one page more than they fill.
    assert LIMITS.grants_per_row == 2


@given(
    st.sampled_from([(0, 1, 1), (3, 1, 4), (4, 4, 16), (5, 8, 4)]),
    st.sampled_from([1, 4, 16, 64]),
    st.integers(0, 2),
    st.integers(1, 5),
    st.integers(0, 500),
)
def test_the_page_table_is_wide_enough_at_every_page_size(
    spec: tuple[int, int, int], page_size: int, depth: int, num_rounds: int, committed: int
) -> None:
    limits = with_limits(
        LIMITS,
        draft_shape=eagle(*spec) if spec[0] else SpeculativeConfig.plain(),
        page_size=page_size,
        overlap_depth=depth,
        num_rounds=num_rounds,
        context_length=500,
        num_pages=1000,
    )
    reserved = limits.reserved_tokens_at_most(committed)
    assert indexing.num_pages(reserved, page_size) <= limits.pages_per_row
    # From one plan to the next a row grows by at most the step that was read in between.
    later = limits.reserved_tokens_at_most(committed + num_rounds * limits.draft_shape.max_emitted)
    new = indexing.num_pages(later, page_size) - indexing.num_pages(reserved, page_size)
    assert new <= limits.grants_per_row


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap_depth": 4}, "overlap_depth is 4; expected 0, 1, 2 or 3"),
        ({"overlap_depth": -1}, "overlap_depth is -1"),
        ({"num_rounds": 0}, "num_rounds is 0; expected at least 1"),
        ({"num_rounds": 1.5}, "num_rounds is 1.5; expected an integer"),
        ({"page_size": 0}, "page_size is 0; expected at least 1"),
        ({"num_pages": 0}, "0 pages of 16 tokens; one request needs at least 2 pages"),
        ({"page_size": 1, "num_pages": 8}, "8 pages of 1 tokens; .* at least 9 pages"),
        ({"decode_buckets": (1, 2)}, r"decode buckets \(1, 2\) must end at .* 4"),
    ],
)
def test_impossible_limits_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_limits(LIMITS, **changes)


def decoder(num_layers: int = 8) -> ModelSpec:
    return uniform_decoder(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
    )


def test_impossible_models_are_refused() -> None:
    attention = decoder().one_layer.attention
    with pytest.raises(ConfigError, match=r"num_attention_heads is 4; expected a multiple of .* 3"):
        replace(attention, num_kv_heads=3)
    with pytest.raises(ConfigError, match="head_dim is 5; expected an even number"):
        replace(attention, head_dim=5)
    with pytest.raises(ConfigError, match="sliding_window is 0; expected at least 1"):
        replace(attention, window=0)
    for top_k in (0, 5):
        with pytest.raises(ConfigError, match=f"num_experts_per_tok is {top_k}; expected 1 to 4"):
            MoESpec(num_experts=4, top_k=top_k, inner=8)


def windowed(*windows: int | None) -> ModelSpec:
    """Return a decoder with these windows, layer by layer."""
    layer = decoder().one_layer
    layers = (replace(layer, attention=replace(layer.attention, window=w)) for w in windows)
    return replace(decoder(), layers=tuple(layers))


def test_runs_of_layers_that_keep_the_same_tokens_are_grouped() -> None:
    def groups(spec: ModelSpec) -> list[tuple[str, int, int | None]]:
        return [(g.name, g.num_layers, g.window) for g in cache_groups(spec, name="t")]

    assert groups(decoder(3)) == [("t", 3, None)]
    assert groups(windowed(8, 8, None, 4)) == [("t 0", 2, 8), ("t 1", 1, None), ("t 2", 1, 4)]
    (group,) = cache_groups(windowed(8, 8), name="t")
    attention = windowed(8).one_layer.attention
    assert group.entry == KV(attention.num_kv_heads, attention.head_dim, attention.head_dim)


def test_groups_of_one_window_are_one_page_space() -> None:
    """The example of `page_spaces`."""
    entry = KV(1, 4, 4)
    a, b, c, d = (
        CacheGroup(name, 2, entry, window)
        for name, window in (("a", 8), ("b", None), ("c", 8), ("d", 4))
    )

    def spaces(*windows: int) -> list[tuple[int | None, tuple[CacheGroup, ...]]]:
        found = page_spaces((a, b, c, d), windows=windows or None)
        return [(space.window, space.groups) for space in found]

    assert spaces() == [(None, (b,)), (4, (d,)), (8, (a, c))]
    assert spaces(8, 99) == [(None, (b, d)), (8, (a, c))]
    assert page_spaces((a,))[0].groups == ()  # the full space always exists
    assert groups_of_layers((a, b, d)) == (a, a, b, b, d, d)


@given(
    committed=st.integers(0, 200), window=st.integers(1, 80), page_size=st.sampled_from([1, 4, 16])
)
def test_a_row_s_window_lies_on_so_many_pages_at_most(
    committed: int, window: int, page_size: int
) -> None:
    limits = with_limits(LIMITS, page_size=page_size, num_pages=1000, num_rounds=3)
    first = max(committed - (window - 1), 0) // page_size
    end = indexing.num_pages(limits.reserved_tokens_at_most(committed), page_size)
    assert end - first <= limits.window_pages_per_row(window)


def test_pools_of_a_window_without_a_space_are_as_large_as_the_full_ones() -> None:
    limits = with_limits(LIMITS, windows=(WindowSpace(8, 40),))
    assert [limits.pool.pages_of(window) for window in (None, 8, 9)] == [64, 40, 64]


def test_only_equal_layers_have_one_layer() -> None:
    assert windowed(8, 8).one_layer.attention.window == 8
    with pytest.raises(ConfigError, match="the model has 2 kinds of layers; expected all equal"):
        _ = windowed(8, None).one_layer


def test_scores_are_scaled_by_the_head_unless_told() -> None:
    attention = decoder().one_layer.attention
    assert attention.softmax_scale == 0.5
    assert replace(attention, scale=0.3).softmax_scale == 0.3


@pytest.mark.parametrize("ids", [(3, 2, 5), (2, 2, 5)])
def test_aux_layers_ascend(ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"aux layer ids are .* expected them to ascend"):
        eagle3_spec(
            layer=decoder(1),
            draft_vocab_size=16,
            target_hidden_size=16,
            aux_layer_ids=ids,
        )


def test_default_aux_layers_need_seven_layers() -> None:
    assert default_aux_layer_ids(7) == (2, 3, 4)
    assert default_aux_layer_ids(32) == (2, 16, 29)
    with pytest.raises(ConfigError, match="a target of 6 layers has no default EAGLE-3 layers"):
        default_aux_layer_ids(6)
