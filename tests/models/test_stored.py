"""Columns of fused weights, and weights read and written in both layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.stored.layouts import check_names
from jspec.models.files.stored.param_reads import on_host, param_reads, read_param
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import StoredFile, open_tensors
from jspec.models.layer_params import attention_params, expert_params
from jspec.models.params import Form, ParamSpec, ParamTable, Part, shard_columns
from jspec.models.placement import abstract_params, nested
from jspec.models.registry import table_of
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import MoESpec
from tests.models.random_params import assert_same, random_params, value_at
from tests.support.tiny_models import tiny_target_config


def attention_of(
    *, num_heads: int, num_kv_heads: int, head_dim: int = 2, bias: bool = False
) -> ParamTable:
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=bias,
        sinks=bias,
    )
    return attention_params(spec, in_size=4, out_size=4)


def declared(table: ParamTable, *path: str) -> ParamSpec:
    return next(spec for spec in table if spec.path == path)


def columns_by_name(spec: ParamSpec, *, shards: int) -> list[str]:
    """Return the name and stored row of each fused column, as in `q3`."""
    columns = []
    parts = spec.layouts[0]
    for index, first, count in shard_columns(parts, shards):
        name = parts[index].name.split(".")[-2].removesuffix("_proj")
        columns += [f"{name}{row}" for row in range(first, first + count)]
    return columns


@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    shards=st.integers(1, 16),
    head_dim=st.sampled_from([2, 4]),
)
def test_every_shard_pairs_its_queries_with_their_own_kv_heads(
    kv_heads: int, group: int, shards: int, head_dim: int
) -> None:
    num_heads = kv_heads * group
    table = attention_of(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    spec = declared(table, "attention", "qkv", "kernel")
    if num_heads % shards or (kv_heads % shards and shards % kv_heads):
        with pytest.raises(ConfigError, match=f"tp_size is {shards}; expected a divisor"):
            spec.physical_shape(shards)
        return
    names = columns_by_name(spec, shards=shards)
    assert spec.physical_shape(shards) == (4, len(names))
    for shard in np.split(np.array(names), shards):
        heads = {
            letter: [int(n[1:]) // head_dim for n in shard[::head_dim] if n[0] == letter]
            for letter in "qkv"
        }
        assert heads["k"] == heads["v"]
        local_group = len(heads["q"]) // len(heads["k"])
        for local, head in enumerate(heads["q"]):
            assert heads["k"][local // local_group] == head // group


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [3, 300])  # within one transposed block, and across two
def test_kernels_are_the_exact_transpose(dtype: Any, size: int, tmp_path: Path) -> None:
    stored = np.random.default_rng(0).standard_normal((size, 5)).astype(dtype)
    save_file({"w": stored}, tmp_path / "model.safetensors")
    part = Part(name="w", shape=(size, 5), size=size)
    spec = ParamSpec(path=("w",), shape=(5, size), layouts=((part,),))
    with open_tensors(tmp_path) as tensors:
        found = read_param(tensors, spec, dtype=dtype, shards=1)
        wide = read_param(tensors, spec, dtype=np.float32, shards=1)
    np.testing.assert_array_equal(found, stored.T, strict=True)
    np.testing.assert_array_equal(wide, stored.T.astype(np.float32), strict=True)


def read(path: Path, table: ParamTable, *, shards: int = 1) -> dict[str, Any]:
    with open_tensors(path) as tensors:
        check_names(tensors, table, is_stray=lambda _: False)
        reads = param_reads(tensors, table, dtype=np.float32, shards=shards)
        return nested(on_host(reads).items())


def test_a_norm_over_heads_is_repeated_like_them(tmp_path: Path) -> None:
    """Two kv heads over four shards: each shard's scale is that of its head."""
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=2, qk_norm=True, norms_span_heads=True
    )
    table = attention_params(spec, in_size=4, out_size=4)
    params = random_params(table)
    save_file(stored_tensors(table, params, dtype=np.float32), tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors:
        read = on_host(param_reads(tensors, table, dtype=np.float32, shards=4))
    path = ("attention", "k_norm", "scale")
    first, second = np.split(value_at(params, path), 2)
    np.testing.assert_array_equal(read[path], np.concatenate((first, first, second, second)))


MIXTURE = MoESpec(num_experts=3, top_k=2, inner=4)


def other_layout(table: ParamTable) -> ParamTable:
    """Return the table with the second layout first, for writing."""
    return tuple(replace(spec, layouts=spec.layouts[::-1]) for spec in table)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_experts_are_read_one_by_one_and_fused(shards: int, tmp_path: Path) -> None:
    table = expert_params(MIXTURE, size=6)
    params = random_params(table)
    written = []
    for layout, own in (("single", table), ("fused", other_layout(table))):
        tensors = stored_tensors(own, params, dtype=np.float32)
        (tmp_path / layout).mkdir()
        save_file(tensors, tmp_path / layout / "model.safetensors")
        written.append(read(tmp_path / layout, table, shards=shards))
    assert_same(written[0], written[1])
    expected = abstract_params(table, dtype=np.float32, shards=shards)
    for spec in table:
        assert value_at(written[0], spec.path).shape == value_at(expected, spec.path).shape
    gate_up, held = params["moe"]["experts"]["gate_up"], written[0]["moe"]["experts"]["gate_up"]
    gate, up = np.split(gate_up, 2, axis=-1)
    for shard, columns in enumerate(np.split(held, shards, axis=-1)):
        local = slice(shard * 4 // shards, (shard + 1) * 4 // shards)
        mine = np.concatenate((gate[..., local], up[..., local]), axis=-1)
        np.testing.assert_array_equal(columns, mine, strict=True)
    single = load_file(tmp_path / "single" / "model.safetensors")
    np.testing.assert_array_equal(single["mlp.experts.2.up_proj.weight"], up[2].T, strict=True)
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    np.testing.assert_array_equal(fused["mlp.experts.gate_up_proj"][1, :4], gate[1].T, strict=True)


@pytest.mark.parametrize("layout", ["single", "fused"])
def test_a_host_reads_its_own_shards(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of columns, or of rows, of every weight; two hosts read each byte of these once."""
    target = table_of(tiny_target_config())
    experts = expert_params(MIXTURE, size=6)
    table = (*target, *(replace(spec, path=("more", *spec.path)) for spec in experts))
    written = table if layout == "single" else other_layout(table)
    save_file(
        stored_tensors(written, random_params(table), dtype=np.float32),
        tmp_path / "model.safetensors",
    )
    num_read = 0
    read_into = StoredFile.read_into

    def counted(file: StoredFile, out: Any, name: str, *, offset: int = 0) -> None:
        nonlocal num_read
        num_read += out.nbytes
        read_into(file, out, name, offset=offset)

    monkeypatch.setattr(StoredFile, "read_into", counted)
    with open_tensors(tmp_path) as tensors:
        for each in param_reads(tensors, table, dtype=np.float32, shards=2):
            num_read = 0
            whole = np.asarray(each.read())
            of_all, num_read = num_read, 0
            split = [each.spec.shards_of(i, 2) == 2 for i in range(len(each.spec.axes))]
            axis = split.index(True) if True in split else None
            for shard in range(2):
                assert each.read_own is not None
                found = np.asarray(each.read_own(range(shard, shard + 1)))
                expected = whole
                if axis is not None:
                    found, expected = (
                        np.split(array, 2, axis=axis)[shard] for array in (found, whole)
                    )
                np.testing.assert_array_equal(found, expected, strict=True)
            if axis is not None and whole.ndim > 1 and layout == "single":
                assert num_read == of_all, each.spec.path


def test_interleaved_rows_and_held_stacks_survive(tmp_path: Path) -> None:
    """Parts take every second row of a stored stack [X, in, out] and of its bias."""

    def parts(name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        return tuple(
            Part(name=name, shape=shape, size=4, num_blocks=4, first=f, step=2, form=Form.AS_IS)
            for f in (0, 1)
        )

    table = (
        ParamSpec(path=("kernel",), shape=(2, 3, 8), layouts=(parts("w", (2, 3, 8)),)),
        ParamSpec(path=("bias",), shape=(2, 8), layouts=(parts("b", (2, 8)),)),
    )
    rng = np.random.default_rng(0)
    stored = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in (("w", (2, 3, 8)), ("b", (2, 8)))
    }
    save_file(stored, tmp_path / "model.safetensors")
    params = read(tmp_path, table)
    for path, name in (("kernel", "w"), ("bias", "b")):
        halves = (stored[name][..., 0::2], stored[name][..., 1::2])
        np.testing.assert_array_equal(params[path], np.concatenate(halves, axis=-1), strict=True)
    found = stored_tensors(table, params, dtype=np.float32)
    for name in stored:
        np.testing.assert_array_equal(found[name], stored[name], strict=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlp.experts.1.up_proj.weight", r"no tensor mlp\.experts\.1\.up_proj\.weight"),
        ("mlp.experts.3.up_proj.weight", r"unknown tensor mlp\.experts\.3\.up_proj\.weight"),
        ("mlp.experts.down_proj", r"unknown tensor mlp\.experts\.down_proj"),
    ],
)
def test_experts_that_do_not_fit_are_named(name: str, message: str, tmp_path: Path) -> None:
    table = expert_params(MIXTURE, size=6)
    tensors = stored_tensors(table, random_params(table), dtype=np.float32)
    if name in tensors:
        del tensors[name]
    else:
        tensors[name] = np.zeros((4, 6), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, table)
