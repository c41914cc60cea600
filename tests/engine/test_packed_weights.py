"""mxfp4 experts in an engine: when they stay packed, their memory, and their updates."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.device.mxfp4 import MXFP4Weight
from jspec.device.weights import dense
from jspec.engine.memory.memory_report import held_bytes
from jspec.engine.weights.loading import LoadedModels
from jspec.errors import CheckpointError, RequestError
from jspec.messages.weight_update import ArrayUpdate, DiskUpdate
from jspec.pallas_kernels import formats
from jspec.spec.weight_format import MXFP4, Op, num_bytes
from tests.models.test_gpt_oss import GOLDEN, write_packed

from .test_served_weights import load, same, serving

EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA reads them packed too: it unpacks in the step."""
    monkeypatch.setitem(formats.TABLE, (MXFP4, Op.EXPERTS, "xla"), formats.Reads())  # type: ignore[arg-type]


def loaded(path: Path, **arguments: Any) -> LoadedModels:
    return load(model_path=str(path), skip_tokenizer_init=True, **arguments)


def experts_of(models: LoadedModels) -> list[Any]:
    layers = models.params["target"]["layers"].values()
    return [layer["moe"]["experts"][name] for layer in layers for name in ("gate_up", "down")]


def test_without_a_kernel_they_are_unpacked_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_packed(tmp_path / "packed")
    with caplog.at_level(logging.INFO, "jspec.engine.weights.resident_formats"):
        models = loaded(tmp_path / "packed")
    (said,) = caplog.messages
    assert said.endswith("experts: mxfp4, unpacked to float32: xla has no kernel for it")
    assert models.target.formats == ()
    assert not [x for x in experts_of(models) if isinstance(x, MXFP4Weight)]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_packed_they_take_the_bytes_of_their_format(
    load_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_packed(tmp_path / "packed")
    with caplog.at_level(logging.INFO, "jspec.engine.weights.resident_formats"):
        models = loaded(tmp_path / "packed", load_format=load_format)
    assert [said.endswith("experts: mxfp4, kept packed") for said in caplog.messages] == [True]
    specs = [spec for spec in models.target.table if spec.op is Op.EXPERTS]
    for weight, spec in zip(experts_of(models), specs, strict=True):
        assert isinstance(weight, MXFP4Weight)
        assert weight.shape == spec.shape
        taken = sum(x.nbytes for x in jax.tree.leaves(weight))
        assert taken == num_bytes(MXFP4(), spec.shape)
    whole = sum(num_bytes(s.format_in("float32"), s.shape) for s in models.target.table)
    assert held_bytes(models.params, shares=())["the target's weights"] == whole


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("has_room", [True, False], ids=["beside", "in_place"])
def test_a_switch_to_other_packed_files_gives_what_a_start_would(
    has_room: bool, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for seed, path in enumerate((ours, theirs)):
        write_packed(path, seed=seed)
    weights, runner = serving(loaded(ours), has_room=lambda _: has_room)
    before = jax.tree.leaves(runner.params)
    weights.switch(weights.prepare(DiskUpdate(target=str(theirs))))
    same(runner.params, loaded(theirs).params)
    assert all(leaf.is_deleted() for leaf in before) is not has_room
    with pytest.raises(CheckpointError, match=rf"no tensor {EXPERTS}_blocks; expected"):
        weights.prepare(DiskUpdate(target=str(GOLDEN)))


@pytest.mark.usefixtures("kept")
def test_by_name_are_the_tensors_that_are_not_packed(tmp_path: Path) -> None:
    write_packed(tmp_path / "packed")
    weights, runner = serving(loaded(tmp_path / "packed"))
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    names = [name for name in stored if not name.endswith(("_blocks", "_scales"))]
    for name in names:
        np.testing.assert_array_equal(weights.tensor(name, None), stored[name])
    for name in (EXPERTS, f"{EXPERTS}_blocks"):
        with pytest.raises(RequestError, match="expected a tensor of"):
            weights.tensor(name, None)
        with pytest.raises(CheckpointError, match=f"unknown tensor {EXPERTS}"):
            weights.prepare(ArrayUpdate(arrays={name: np.zeros((4, 64, 32), np.float32)}))
    old = runner.params["target"]["layers"][0]["moe"]["experts"]["down"]
    change = {"model.norm.weight": stored["model.norm.weight"] * 2}
    weights.switch(weights.prepare(ArrayUpdate(arrays=change)))
    np.testing.assert_array_equal(weights.tensor("model.norm.weight", None), *change.values())
    new = runner.params["target"]["layers"][0]["moe"]["experts"]["down"]
    np.testing.assert_array_equal(dense(new, np.float32), dense(old, np.float32))
