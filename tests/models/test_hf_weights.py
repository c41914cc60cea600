"""Safetensors files on disk: single, sharded, damaged; and the fused columns' arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jspec.core.config import TransformerConfig
from jspec.core.errors import CheckpointError, ConfigError
from jspec.models.hf_weights import (
    fuse_kernel,
    gate_up_placements,
    kernel,
    num_columns,
    open_tensors,
    qkv_placements,
    unfuse,
)


def config_of(*, num_heads: int, num_kv_heads: int, head_dim: int = 2) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def write_two_files(path: Path, *, weight_map: dict[str, str] | None = None) -> None:
    save_file({"a": np.zeros(2, np.float32)}, path / "one.safetensors")
    save_file({"b": np.ones(3, np.float32)}, path / "two.safetensors")
    weight_map = weight_map or {"a": "one.safetensors", "b": "two.safetensors"}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_all(path: Path) -> dict[str, Any]:
    with open_tensors(path) as tensors:
        return {name: tensors.read(name) for name in tensors.sources}


def columns_by_name(placements: dict[str, list[Any]]) -> list[str]:
    """The name and stored row that each fused column takes, as in `q3`."""
    columns = [""] * num_columns(placements)
    for name, placed in placements.items():
        for rows, target in placed:
            for row, column in zip(
                range(rows.start, rows.stop), range(target.start, target.stop), strict=True
            ):
                assert columns[column] == ""
                columns[column] = f"{name.removesuffix('_proj')}{row}"
    return columns


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (1, "q0 q1 q2 q3 k0 k1 v0 v1"),
        (2, "q0 q1 k0 v0 q2 q3 k1 v1"),
        (4, "q0 k0 v0 q1 k0 v0 q2 k1 v1 q3 k1 v1"),
    ],
)
def test_qkv_columns_of_the_worked_example(shards: int, expected: str) -> None:
    placements = qkv_placements(config_of(num_heads=4, num_kv_heads=2), shards=shards)
    heads = [name for name in columns_by_name(placements) if int(name[1:]) % 2 == 0]
    assert " ".join(f"{name[0]}{int(name[1:]) // 2}" for name in heads) == expected


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (1, "gate0 gate1 gate2 gate3 up0 up1 up2 up3"),
        (2, "gate0 gate1 up0 up1 gate2 gate3 up2 up3"),
    ],
)
def test_gate_up_columns_of_the_worked_example(shards: int, expected: str) -> None:
    assert " ".join(columns_by_name(gate_up_placements(4, shards=shards))) == expected


@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    shards=st.integers(1, 16),
    head_dim=st.sampled_from([2, 4]),
)
def test_every_shard_pairs_its_queries_with_their_own_kv_heads(
    kv_heads: int, group: int, shards: int, head_dim: int
) -> None:
    config = config_of(num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim)
    servable = config.num_heads % shards == 0 and (kv_heads % shards == 0 or shards % kv_heads == 0)
    if not servable:
        with pytest.raises(ConfigError, match=f"tensor parallel size is {shards}"):
            qkv_placements(config, shards=shards)
        return
    names = columns_by_name(qkv_placements(config, shards=shards))
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
    with open_tensors(tmp_path) as tensors:
        np.testing.assert_array_equal(kernel(tensors, "w", dtype=dtype), stored.T, strict=True)
        wide = kernel(tensors, "w", dtype=np.float32)
    np.testing.assert_array_equal(wide, stored.T.astype(np.float32), strict=True)


def test_bfloat16_is_read_where_nothing_else_taught_numpy_the_type(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 3), ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    program = (
        "import sys, pathlib; from jspec.models.hf_weights import open_tensors\n"
        "with open_tensors(pathlib.Path(sys.argv[1])) as tensors:\n"
        "    print(tensors.weight('w').dtype, {'jax', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["bfloat16", "set()"]


def test_unfuse_undoes_fuse(tmp_path: Path) -> None:
    placements = qkv_placements(config_of(num_heads=4, num_kv_heads=2), shards=1)
    rng = np.random.default_rng(0)
    stored = {
        f"x.{name}.weight": rng.standard_normal((rows, 4)).astype(np.float32)
        for name, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4))
    }
    save_file(stored, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors:
        fused = fuse_kernel(tensors, "x.", placements, in_size=4, dtype=np.float32)
    found = unfuse(fused, placements, "x.", dtype=np.float32)
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(found[name], value, strict=True)


def test_an_index_joins_its_files(tmp_path: Path) -> None:
    write_two_files(tmp_path)
    found = read_all(tmp_path)
    np.testing.assert_array_equal(found["a"], np.zeros(2))
    np.testing.assert_array_equal(found["b"], np.ones(3))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "three.safetensors"}, r"three\.safetensors: cannot be read"),
        ({"a": "two.safetensors"}, r"two\.safetensors: no tensor a, which the index names"),
        ({"a": "../one.safetensors"}, r"index\.json: .*outside this directory"),
        ({"a": 3}, r"index\.json: cannot be read as an index"),
    ],
)
def test_an_index_that_lies_is_refused(
    weight_map: dict[str, str], message: str, tmp_path: Path
) -> None:
    write_two_files(tmp_path, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=message):
        read_all(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(100, np.float32)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        read_all(tmp_path)


def test_a_corrupt_header_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(100, np.float32)}, file)
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        read_all(tmp_path)


def test_no_safetensors_names_what_is_there_instead(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or"):
        read_all(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin: convert"):
        read_all(tmp_path)


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1), "x.a": np.zeros(1)}, tmp_path / "model.safetensors")
    with (
        pytest.raises(CheckpointError, match=r"x\.a is a second a"),
        open_tensors(tmp_path, canonical=lambda name: name.removeprefix("x.")),
    ):
        pass
