"""Safetensors files on disk: single, sharded, damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.errors import CheckpointError
from jspec.models.files.tensor_files import open_tensors


def write_two_files(path: Path, *, weight_map: Any = None) -> None:
    save_file({"a": np.zeros(2, np.float32)}, path / "one.safetensors")
    save_file({"b": np.ones(3, np.float32)}, path / "two.safetensors")
    weight_map = weight_map or {"a": "one.safetensors", "b": "two.safetensors"}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_all(path: Path) -> dict[str, Any]:
    with open_tensors(path) as tensors:
        return {name: tensors.read(name) for name in tensors.sources}


def test_bfloat16_is_read_where_nothing_else_taught_numpy_the_type(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 3), ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    program = (
        "import sys, pathlib; from jspec.models.files.tensor_files import open_tensors\n"
        "with open_tensors(pathlib.Path(sys.argv[1])) as tensors:\n"
        "    print(tensors.weight('w').dtype, {'jax', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["bfloat16", "set()"]


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
        ({"a": "/one.safetensors"}, r"index\.json: .*outside this directory"),
        ({"a": "x/../one.safetensors"}, r"index\.json: .*outside this directory"),
        ({"a": 3}, r"index\.json: weight_map has 3 for a; expected a file's name"),
        ({"a": ".."}, r"index\.json: weight_map has '\.\.' for a; expected a file's name"),
        ({"a": ""}, r"index\.json: weight_map has '' for a"),
        ({"a": "\0"}, r"index\.json: weight_map has '\\x00' for a"),
        (["a"], r"index\.json: weight_map is \['a'\]; expected an object of tensor and file"),
        ("a", r"index\.json: weight_map is 'a'; expected an object"),
    ],
)
def test_an_index_that_lies_is_refused(weight_map: Any, message: str, tmp_path: Path) -> None:
    write_two_files(tmp_path, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=message):
        read_all(tmp_path)


def test_all_that_an_index_says_wrongly_is_one_error(tmp_path: Path) -> None:
    write_two_files(
        tmp_path,
        weight_map={"a": "two.safetensors", "c": "two.safetensors", "d": "three.safetensors"},
    )
    with pytest.raises(CheckpointError) as caught:
        read_all(tmp_path)
    first, *lines = str(caught.value).split("\n  ")
    assert first == "3 faults in the files that the index names"
    assert lines[0].startswith(f"{tmp_path / 'three.safetensors'}: cannot be read: ")
    two = tmp_path / "two.safetensors"
    assert lines[1:] == [f"{two}: no tensor {name}, which the index names" for name in "ac"]


def test_a_file_cut_short_after_it_was_opened_names_the_tensor(tmp_path: Path) -> None:
    """Files are not memory-mapped: a map would end the process by a signal."""
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(4, np.float32), "b": np.ones((90, 90), np.float32)}, file)
    with open_tensors(tmp_path) as tensors:
        os.truncate(file, file.stat().st_size - 4)
        np.testing.assert_array_equal(tensors.weight("a"), np.zeros(4))
        for read in (tensors.weight, lambda name: list(tensors.row_blocks(name, range(80, 90)))):
            with pytest.raises(CheckpointError, match=r"cannot read b: the file ends.*4 more"):
                read("b")
        with pytest.raises(CheckpointError, match=r"b has 32400 bytes; expected at least 32760"):
            list(tensors.row_blocks("b", range(1, 91)))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_rows_come_block_by_block(dtype: Any, tmp_path: Path) -> None:
    whole = np.random.default_rng(0).standard_normal((2, 50, 20_000)).astype(dtype)
    save_file({"first": np.zeros(3, np.int8), "w": whole}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors:
        np.testing.assert_array_equal(tensors.weight("w"), whole, strict=True)
        blocks = [(at, block.copy()) for at, block in tensors.row_blocks("w", range(30, 90))]
        assert [at for at, _ in blocks] == list(range(30, 90, len(blocks[0][1])))
        assert len(blocks) > 2
        joined = np.concatenate([block for _, block in blocks])
    np.testing.assert_array_equal(joined, whole.reshape(100, -1)[30:90], strict=True)


def test_threads_may_read_the_same_file_at_once(tmp_path: Path) -> None:
    stored = {f"w{i}": np.full((300, 300), i, np.float32) for i in range(8)}
    save_file(stored, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors, ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for name, found in zip(stored, pool.map(tensors.weight, stored), strict=True):
                np.testing.assert_array_equal(found, stored[name], strict=True)


def cut(keep: int) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:keep])

    return write


def without_header(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(bytes(data))


def with_header_of(length: int) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        with file.open("wb") as out:
            out.write(length.to_bytes(8, "little"))
            out.truncate(2**37)  # a sparse file

    return write


@pytest.mark.parametrize(
    "damage",
    [
        *(cut(keep) for keep in (0, 4, 60, -1)),
        without_header,
        *(with_header_of(length) for length in (2**63, 2**62, 10**8 + 1, 99 * 10**6)),
    ],
)
def test_a_damaged_file_is_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(100, np.float32)}, file)
    damage(file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        read_all(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "shard"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    if name == "shard":
        index = {"weight_map": {"a": "shard"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read: it is not a regular file"):
        read_all(tmp_path)


def test_a_huge_index_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as out:
        out.truncate(2**37)
    with pytest.raises(CheckpointError, match=r"index\.json: is larger than \d+ bytes"):
        read_all(tmp_path)


def check(path: Path, **expected: tuple[int, ...]) -> None:
    with open_tensors(path) as tensors:
        tensors.check(
            expected,
            optional={"ids": (2,)},
            is_stray=lambda name: name.startswith("stray"),
            integers=("ids",),
        )


def test_all_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "good": np.zeros(2, np.float32),
        "wide": np.zeros(3, np.float32),
        "typed": np.zeros(2, np.int8),
        "both": np.zeros(3, np.int8),
        "extra": np.zeros(4, np.float32),
        "ids": np.zeros(2, np.int64),
        "stray": np.zeros(2, np.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    served = "expected one of F16, BF16, F32, F64 (quantized weights are not served)"
    with pytest.raises(CheckpointError) as caught:
        check(tmp_path, good=(2,), wide=(2,), typed=(2,), both=(2,), absent=(5, 6), gone=(1,))
    assert str(caught.value).splitlines() == [
        f"{tmp_path}: 7 tensors do not fit",
        "  no tensor absent; expected shape (5, 6)",
        "  no tensor gone; expected shape (1,)",
        "  unknown tensor extra of shape (4,); expected only names of this architecture",
        "  both has shape (3,); expected (2,)",
        "  wide has shape (3,); expected (2,)",
        f"  both has dtype I8; {served}",
        f"  typed has dtype I8; {served}",
    ]


def test_what_does_not_fit_is_named_with_its_file(tmp_path: Path) -> None:
    write_two_files(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        check(tmp_path, b=(9,))
    _, unknown, misshapen = str(caught.value).splitlines()
    assert unknown.startswith("  unknown tensor a of")
    assert unknown.endswith(", in one.safetensors")
    assert misshapen == "  b has shape (3,); expected (9,), in two.safetensors"


def test_a_long_list_of_what_does_not_fit_is_cut(tmp_path: Path) -> None:
    save_file(
        {f"u{i:03}": np.zeros(1, np.float32) for i in range(21)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError) as caught:
        check(tmp_path, **{f"m{i:03}": (i,) for i in range(500)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 21 + 21
    assert lines[0].endswith("521 tensors do not fit")
    assert lines[20:22] == [
        "  no tensor m019; expected shape (19,)",
        "  480 more are missing, 500 in all",
    ]
    assert lines[-1] == "  1 more are unknown, 21 in all"


def test_no_weights_name_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or"):
        read_all(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read"):
        read_all(tmp_path)


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1), "x.a": np.zeros(1)}, tmp_path / "model.safetensors")
    with (
        pytest.raises(CheckpointError, match=r"x\.a is a second a"),
        open_tensors(tmp_path, canonical=lambda name: name.removeprefix("x.")),
    ):
        pass
