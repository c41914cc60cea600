"""Experts split over devices: the logits of one device, and on each device its own experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.config.engine_args import EngineArgs
from jspec.config.expert_placement import ExpertMap
from jspec.device.fp8 import FP8Weight
from jspec.device.mxfp4 import MXFP4Weight
from jspec.device.parallel import Parallel
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.engine.weights.served_weights import ServedWeights
from jspec.messages.weight_update import ArrayUpdate, DiskUpdate
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.files.stored import param_reads as stored
from jspec.models.files.stored.param_reads import param_reads
from jspec.models.files.tensor_files import StoredFile, Tensors, open_tensors
from jspec.models.params import ParamSpec, with_expert_map
from jspec.models.registry import table_of
from jspec.pallas_kernels import formats
from jspec.spec.expert_shards import experts_by_layer, has_experts, on_expert_shards
from jspec.spec.weight_format import MXFP4, Op
from tests.engine.test_served_weights import Params
from tests.models.family_checkpoints import FAMILY_CHECKPOINTS, GOLDEN, logits_over
from tests.models.fp8_checkpoints import moe_spec, write_fp8, write_plain
from tests.models.test_gpt_oss import write_packed
from tests.support.golden_arrays import arrays_of

OF_EXPERTS = tuple(
    name
    for name in (*FAMILY_CHECKPOINTS, "qwen3_moe_fp8")
    if name != "mimo" and has_experts(load_model_spec(GOLDEN / name))
)
# Mesh (expert, tensor); some checkpoints have 6 experts, or heads that 4 does not divide.
MESHES = {
    **dict.fromkeys(OF_EXPERTS, (2, 2)),
    **dict.fromkeys(("step3p5", "qwen3_next", "qwen3_5_moe"), (2, 1)),
    **dict.fromkeys(("deepseek_v3", "gpt_oss"), (4, 1)),
}
FAST, IN_CI = "qwen3_moe", ("deepseek_v3",)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name) for name in (FAST,)),
        *(pytest.param(name, marks=pytest.mark.slow) for name in IN_CI),
        *(
            pytest.param(name, marks=(pytest.mark.slow, pytest.mark.exhaustive))
            for name in OF_EXPERTS
            if name not in (FAST, *IN_CI)
        ),
    ],
)
def test_logits_are_those_of_transformers(name: str) -> None:
    golden = arrays_of(GOLDEN / name / "outputs.npz")
    expert, tensor = MESHES[name]
    logits = logits_over(Parallel(expert=expert, tensor=tensor), GOLDEN / name, golden["token_ids"])
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_packed_experts_are_split_like_unpacked_ones(tmp_path: Path) -> None:
    write_packed(tmp_path / "packed")
    ids = arrays_of(GOLDEN / "gpt_oss" / "outputs.npz")["token_ids"]
    found, expected = (
        logits_over(Parallel(expert=4), tmp_path / "packed", ids, formats=own)
        for own in (((Op.EXPERTS, MXFP4()),), ())
    )
    np.testing.assert_array_equal(found, expected)


def load(path: Path, parallel: Parallel, **more: Any) -> LoadedModels:
    args = EngineArgs(
        model_path=str(path),
        skip_tokenizer_init=True,
        dtype="float32",
        tp_size=parallel.model,
        ep_size=parallel.expert,
        **more,
    )
    mesh = parallel.mesh(jax.devices("cpu")[: parallel.model])
    return load_models(args, resolve_paths(args), mesh=mesh)


@pytest.mark.parametrize(("tensor", "is_packed"), [(1, True), (2, False)])
def test_a_device_has_its_own_experts_alone(
    tensor: int, is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay packed if each is whole, as the kernel needs it; the host has one part at once."""
    sizes: list[int] = []
    read_param = stored.read_param

    def watched(tensors: Tensors, spec: ParamSpec, **how: Any) -> Any:
        sizes.extend(spec.shape[:1] if spec.num_parts > 1 else ())
        return read_param(tensors, spec, **how)

    monkeypatch.setattr(stored, "read_param", watched)
    reads = formats.Reads(most_shards=1)
    monkeypatch.setitem(formats.TABLE, (MXFP4, Op.EXPERTS, "xla"), reads)  # type: ignore[arg-type]
    write_packed(tmp_path / "packed")
    one, split = (
        load(tmp_path / "packed", parallel).params["target"]["layers"][0]["moe"]["experts"]["down"]
        for parallel in (Parallel(tensor=tensor), Parallel(expert=2, tensor=tensor))
    )
    assert isinstance(split, MXFP4Weight) == is_packed
    assert {*sizes} == {jax.tree.leaves(one)[0].shape[0] // 2}
    for whole, parts in zip(jax.tree.leaves(one), jax.tree.leaves(split), strict=True):
        assert len(parts.addressable_shards) == 2 * tensor
        for shard in parts.addressable_shards:
            assert shard.data.shape[0] == whole.shape[0] // 2
            np.testing.assert_array_equal(shard.data, np.asarray(whole)[shard.index])


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "packed"])
def test_a_device_reads_only_its_own_experts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are a tensor each, a stack, and a packed stack; one of them is on both."""
    num_read = 0
    read_into, packed = StoredFile.read_into, Tensors.packed

    def counted(file: StoredFile, out: Any, name: str, *, offset: int = 0) -> None:
        nonlocal num_read
        num_read += out.nbytes
        read_into(file, out, name, offset=offset)

    def counted_packed(tensors: Tensors, name: str, index: int) -> Any:
        nonlocal num_read
        found = packed(tensors, name, index)
        num_read += found.nbytes
        return found

    monkeypatch.setattr(StoredFile, "read_into", counted)
    monkeypatch.setattr(Tensors, "packed", counted_packed)
    monkeypatch.setattr(stored, "BLOCK_BYTES", 0)
    path = GOLDEN / kind
    if kind == "packed":
        path = tmp_path / "packed"
        write_packed(path)
    spec = load_model_spec(path)
    count = experts_by_layer(spec)[-1]
    table = table_of(on_expert_shards(spec, 2, spares=count))
    placed = (*range(count - 1), 0, *reversed(range(count)))
    table = with_expert_map(table, (placed,) * spec.num_layers)
    found = 0
    with open_tensors(path) as tensors:
        for each in param_reads(tensors, table, dtype=np.float32, shards=2):
            if each.read_part is None:
                assert "experts" not in each.spec.path or each.spec.path[-1] == "down_bias"
                continue
            found, num_read = found + 1, 0
            whole, of_all = np.asarray(each.read()), num_read
            for part in (range(count), range(count, 2 * count)):
                num_read = 0
                own = np.asarray(each.read_part(part))
                np.testing.assert_array_equal(own, whole[part.start : part.stop], strict=True)
                assert num_read == of_all // 2
            if kind == "qwen3_moe":
                assert each.host_bytes == whole.nbytes // 2
    assert found == spec.num_layers * (2 if kind == "qwen3_moe" else 3)


def placement(path: Path, directory: Path, *, spares: int) -> tuple[ExpertMap, dict[str, Any]]:
    """Return a map with some of the experts twice, in no order, and the arguments that give it."""
    rng = np.random.default_rng(0)
    counts = experts_by_layer(load_model_spec(path))
    placed = tuple(tuple(rng.permutation([*range(n), *range(spares)]).tolist()) for n in counts)
    file = directory / "experts.json"
    file.write_text(json.dumps({"physical_to_logical_map": placed}))
    return placed, {"init_expert_location": str(file), "ep_num_redundant_experts": spares}


@pytest.mark.parametrize("load_format", ["auto", "packed", "fp8", "fp8, dummy", "dummy"])
def test_placed_experts_are_those_of_the_map(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mesh = GOLDEN / "qwen3_moe", Parallel(expert=2, tensor=2)
    if load_format == "packed":
        reads = formats.Reads(most_shards=1)
        monkeypatch.setitem(formats.TABLE, (MXFP4, Op.EXPERTS, "xla"), reads)  # type: ignore[arg-type]
        path, mesh = tmp_path / "packed", Parallel(expert=2)
        write_packed(path)
    if "fp8" in load_format:
        path, mesh = tmp_path / "fp8", Parallel(expert=2)
        write_fp8(write_plain(tmp_path / "plain", moe_spec()), path, "blocks")
    more = {"load_format": "dummy"} if "dummy" in load_format else {}
    placed, how = placement(path, tmp_path, spares=2)
    one, split = (
        load(path, each, **more, **given).params["target"]
        for each, given in ((replace(mesh, expert=1), {}), (mesh, how))
    )
    for layer, of_layer in enumerate(placed):
        experts = one["layers"][layer]["moe"]["experts"]
        for name in set(experts) - {"down_bias"}:
            own = split["layers"][layer]["moe"]["experts"][name]
            is_packed = load_format == "packed" and "bias" not in name
            assert isinstance(own, MXFP4Weight) == is_packed
            assert isinstance(own, FP8Weight) == ("fp8" in load_format)
            for whole, parts in zip(
                jax.tree.leaves(experts[name]), jax.tree.leaves(own), strict=True
            ):
                expected = np.asarray(whole)[list(of_layer)]
                for shard in parts.addressable_shards:
                    assert shard.data.shape[0] == len(of_layer) // 2
                    np.testing.assert_array_equal(shard.data, expected[shard.index])
        copies = np.asarray(split["expert_copies"][layer])
        for expert, (count, *where) in enumerate(copies.tolist()):
            assert [of_layer[place] for place in where[:count]] == [expert] * of_layer.count(expert)


@pytest.mark.parametrize("is_placed", [False, True])
def test_split_experts_are_read_and_replaced_by_name(is_placed: bool, tmp_path: Path) -> None:
    mesh = Parallel(expert=2, tensor=2)
    _, how = placement(GOLDEN / "qwen3_moe", tmp_path, spares=2)
    models = load(GOLDEN / "qwen3_moe", mesh, **(how if is_placed else {}))
    runner = Params(models.params)
    devices = jax.devices("cpu")[: mesh.model]
    weights = ServedWeights(replace(models, params={}), runner, mesh=mesh.mesh(devices))
    file = load_file(GOLDEN / "qwen3_moe" / "model.safetensors")
    experts = {name: value for name, value in file.items() if ".experts." in name}
    assert experts
    for factor in (1, 2):
        for name, value in experts.items():
            np.testing.assert_array_equal(weights.tensor(name, None), factor * value)
        doubled = {name: 2 * value for name, value in experts.items()}
        weights.switch(weights.prepare(ArrayUpdate(arrays=doubled)))
    weights.switch(weights.prepare(DiskUpdate(target=str(GOLDEN / "qwen3_moe"))))
    name, value = next(iter(experts.items()))
    np.testing.assert_array_equal(weights.tensor(name, None), value)
    assert ("expert_copies" in runner.params["target"]) == is_placed
