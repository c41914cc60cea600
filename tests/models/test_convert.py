"""Checkpoints in other formats have the same tensors, on any number of shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.cli.main import main
from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel
from jspec.engine.weights.loading import load_models, resolve_paths
from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.convert import Format, convert
from jspec.models.files.tensor_files import open_tensors
from jspec.spec.weight_format import FP8
from tests.support.tiny_models import TinyPair, write_tiny_pair

TORCH = Path(__file__).parents[1] / "golden" / "torch" / "pytorch_model.bin"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("model", ["target", "draft"])
def test_orbax_and_back_is_the_same_checkpoint(
    pair: TinyPair, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = pair.target_path if model == "target" else pair.draft_path
    middle, back = tmp_path / "orbax", tmp_path / "back"
    assert main(["convert", str(source), str(middle), "--to", "orbax"]) == 0
    assert main(["convert", str(middle), str(back), "--to", "safetensors"]) == 0
    ours, theirs = (load_file(path / "model.safetensors") for path in (source, back))
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value, strict=True)
    assert f"{len(ours)} tensors" in capsys.readouterr().out
    rest = {path.name: path.read_bytes() for path in source.iterdir() if path.suffix == ".json"}
    for path in (middle, back):
        assert {p.name: p.read_bytes() for p in path.iterdir() if p.suffix == ".json"} == rest
    assert sorted(p.name for p in middle.iterdir()) == sorted([*rest, "orbax"])


def test_every_shard_has_the_weights_that_safetensors_give(pair: TinyPair, tmp_path: Path) -> None:
    paths = {"target": pair.target_path, "draft": pair.draft_path}
    for name, path in paths.items():
        convert(path, tmp_path / name, Format.ORBAX)
    wanted = params_of(paths["target"], paths["draft"], shards=2)
    found = params_of(tmp_path / "target", tmp_path / "draft", shards=2)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def params_of(target: Path, draft: Path, *, shards: int, **arguments: Any) -> Any:
    args = EngineArgs(
        model_path=str(target),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(draft),
        dtype="float32",
        tp_size=shards,
        **arguments,
    )
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    return load_models(args, resolve_paths(args), mesh=mesh).params


def test_types_of_all_kinds_stay(tmp_path: Path) -> None:
    source = tmp_path / "torch"
    source.mkdir()
    shutil.copy(TORCH, source)
    convert(source, tmp_path / "orbax", Format.ORBAX)
    convert(source, tmp_path / "safetensors", Format.SAFETENSORS)
    with open_tensors(source) as wanted:
        for name in ("orbax", "safetensors"):
            with open_tensors(tmp_path / name) as found:
                assert set(found.sources) == set(wanted.sources)
                for tensor in wanted.sources:
                    assert found.dtype(tensor) == wanted.dtype(tensor)
                    np.testing.assert_array_equal(
                        found.read(tensor), wanted.read(tensor), strict=True
                    )


def test_what_is_large_becomes_several_files(pair: TinyPair, tmp_path: Path) -> None:
    done = convert(pair.target_path, tmp_path / "parts", Format.SAFETENSORS, max_file_bytes=30_000)
    files = sorted(p.name for p in tmp_path.joinpath("parts").glob("*.safetensors"))
    assert len(files) == done.num_files > 2
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == done.num_bytes
    with open_tensors(pair.target_path) as wanted, open_tensors(tmp_path / "parts") as found:
        for name in wanted.sources:
            np.testing.assert_array_equal(found.read(name), wanted.read(name))


def test_what_cannot_be_converted_is_said_and_leaves_nothing(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"none is no directory"):
        convert(tmp_path / "none", tmp_path / "out", Format.ORBAX)
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        convert(tmp_path, tmp_path.parent / "out", Format.ORBAX)
    with pytest.raises(ConfigError, match="expected a new or an empty directory"):
        convert(pair.target_path, pair.draft_path, Format.ORBAX)
    with pytest.raises(ConfigError, match="expected a directory elsewhere"):
        convert(pair.target_path, pair.target_path / "out", Format.ORBAX)
    cut = tmp_path / "cut"
    cut.mkdir()
    save_file({"x": np.zeros(4, np.float32)}, cut / "model.safetensors")
    convert(cut, tmp_path / "orbax", Format.ORBAX)
    for path in (tmp_path / "orbax" / "orbax").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"orbax: cannot (be read|read .*)"):
        convert(tmp_path / "orbax", tmp_path / "back", Format.SAFETENSORS)
    assert not (tmp_path / "back").exists()
    assert main(["convert", str(cut), str(pair.draft_path), "--to", "orbax"]) == 2
    assert "is there already; expected a new or an empty directory" in capsys.readouterr().err
    assert main(["convert", str(cut), str(tmp_path / "x"), "--to", "gguf"]) == 2
    assert "invalid choice: 'gguf'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "dtype", "stored_dtype"),
    [("fp8", "float8_e4m3fn", "F8_E4M3"), ("w8a8_int8", "int8", "I8")],
)
def test_a_quantized_target_is_served_as_one_that_is_quantized_while_it_loads(
    pair: TinyPair, tmp_path: Path, flag: str, dtype: str, stored_dtype: str
) -> None:
    out = tmp_path / flag
    words = ["--to", "safetensors", "--quantization", flag]
    assert main(["convert", str(pair.target_path), str(out), *words]) == 0
    found = params_of(out, pair.draft_path, shards=1)
    wanted = params_of(pair.target_path, pair.draft_path, shards=1, quantization=flag)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    codes = [leaf for leaf in jax.tree.leaves(found["target"]) if leaf.dtype.name == dtype]
    # qkv, out, gate and up, down of each layer
    assert len(codes) == 4 * pair.target_config.num_layers
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]
    name = "model.layers.0.mlp.down_proj.weight"
    with open_tensors(out) as stored:
        assert stored.dtype(name) == stored_dtype
        assert stored.shape(f"{name}_scale") == (stored.shape(name)[0], 1)


@pytest.mark.parametrize("fault", ["twice", "draft"])
def test_what_is_not_quantized(pair: TinyPair, tmp_path: Path, fault: str) -> None:
    once = tmp_path / "once"
    if fault == "twice":
        convert(pair.target_path, once, Format.SAFETENSORS, quantize=FP8())
    source = once if fault == "twice" else pair.draft_path
    message = "is quantized by 'compressed-tensors'; expected" if fault == "twice" else "architect"
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "out", Format.SAFETENSORS, quantize=FP8())
    assert not (tmp_path / "out").exists()
