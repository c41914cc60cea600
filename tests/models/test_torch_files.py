"""torch.save's files, read without torch and without running anything in them."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jspec.errors import CheckpointError
from jspec.models.files.tensor_files import has_tensors, open_tensors
from jspec.models.files.torch_files import open_torch_file, read_torch_tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "torch"
NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6) / 4
EXPECTED = {
    "f16": ("F16", NUMBERS.astype(np.float16)),
    "bf16": ("BF16", NUMBERS.astype(ml_dtypes.bfloat16)),
    "f32": ("F32", NUMBERS),
    "f64": ("F64", NUMBERS.astype(np.float64)),
    "rows": ("F32", NUMBERS[1:3]),
    "i64": ("I64", np.arange(5) * 7 - 3),
    "bool": ("BOOL", np.arange(6) % 2 == 0),
    "scalar": ("F32", np.asarray(2.5, np.float32)),
}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "checkpoint.bin"])
def test_every_tensor_is_what_torch_saved(name: str) -> None:
    file = open_torch_file(GOLDEN / name)
    assert set(file.keys()) == set(EXPECTED)
    for tensor, (dtype, values) in EXPECTED.items():
        assert file.get_slice(tensor).get_dtype() == dtype
        assert tuple(file.get_slice(tensor).get_shape()) == values.shape
        np.testing.assert_array_equal(file.get_tensor(tensor), values, strict=True)


def test_a_directory_of_torchs_weights_is_a_checkpoint(tmp_path: Path) -> None:
    assert not has_tensors(tmp_path)
    shutil.copy(GOLDEN / "pytorch_model.bin", tmp_path)
    assert has_tensors(tmp_path)
    with open_tensors(tmp_path) as tensors:
        for name in ("f16", "bf16", "f32", "rows"):
            values = EXPECTED[name][1]
            assert tensors.shape(name) == values.shape
            np.testing.assert_array_equal(tensors.weight(name), values, strict=True)
            blocks = list(tensors.row_blocks(name, range(1, 2)))
            np.testing.assert_array_equal(blocks[0][1], values[1:2])
        np.testing.assert_array_equal(tensors.read("i64"), EXPECTED["i64"][1])


@pytest.mark.parametrize("name", ["map.pt", "list.pt"])
def test_one_tensor_or_a_list(name: str) -> None:
    np.testing.assert_array_equal(read_torch_tensor(GOLDEN / name), [300, 5, 17, 4])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("turned.bin", r"turned\.bin: a tensor of shape \(6, 4\) has strides \(1, 6\)"),
        ("module.bin", r"names 'torch\.nn\.modules\.linear\.Linear'; expected tensors, lists"),
        ("old.bin", r"old\.bin: cannot be read: .*; expected torch\.save's zip format"),
        ("map.pt", r"map\.pt: holds TorchTensor; expected tensors by name"),
        ("absent.bin", r"absent\.bin: cannot be read"),
    ],
)
def test_a_file_of_something_else_is_refused(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_torch_file(GOLDEN / name)


class Attack:
    """An object that pickles to a call."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


def pickled(path: Path, payload: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", payload)
    return path


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_runs_nothing(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    attacks = (
        Attack(os.system, f"touch {trace}"),
        Attack(eval, f"open({str(trace)!r}, 'w')"),
        Attack(getattr, trace, "touch"),
    )
    for attack in attacks:
        payload = pickle.dumps({"x": attack}, protocol=protocol)
        with pytest.raises(
            CheckpointError, match=r"its pickle names '(posix|builtins|__builtin__)"
        ):
            open_torch_file(pickled(tmp_path / "bad.bin", payload))
    assert not trace.exists()


@pytest.mark.parametrize("payload", [b"", b"\x80\x02", b"garbage", b"\x80\x02K\x01."])
def test_a_broken_pickle_is_an_error(payload: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"bad\.bin: (cannot be read|holds int)"):
        open_torch_file(pickled(tmp_path / "bad.bin", payload))


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    data = (GOLDEN / "pytorch_model.bin").read_bytes()
    for size in (0, 100, len(data) // 2, len(data) - 30):
        (tmp_path / "pytorch_model.bin").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read"):
            open_torch_file(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"K\x04K\x06\x86", b"K\x09K\x06\x86", r"shape \(9, 6\) .*ends after"),
        (b"HalfStorage", b"WeirStorage", r"names 'torch\.WeirStorage'"),
    ],
)
def test_a_tensor_that_its_storage_does_not_hold_is_refused(
    old: bytes, new: bytes, message: str, tmp_path: Path
) -> None:
    source = zipfile.ZipFile(GOLDEN / "pytorch_model.bin")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for info in source.infolist():
            data = source.read(info)
            is_pickle = info.filename.endswith("data.pkl")
            archive.writestr(info.filename, data.replace(old, new, 1) if is_pickle else data)
    (tmp_path / "bad.bin").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match=message):
        open_torch_file(tmp_path / "bad.bin")
