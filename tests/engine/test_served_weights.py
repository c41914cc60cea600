"""Weights read by name and switched: every tensor, one and two shards, with and without copies."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.engine.weights.served_weights import ServedWeights
from jspec.engine.weights.weight_checks import is_finite
from jspec.engine.weights.weight_switch import SameAs, SwitchError, switch_leaves
from jspec.errors import CheckpointError, ConfigError, EngineClosedError, RequestError
from jspec.messages.weight_update import AdapterUpdate, ArrayUpdate, DiskUpdate, Model
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import HostArray
from jspec.models.heads.eagle3 import save_eagle3
from jspec.models.heads.head_params import head_params
from jspec.models.placement import init_params
from jspec.spec.head_spec import eagle1_spec
from tests.speculative.mtp_checkpoints import CONFIGS, write_checkpoint
from tests.support.lora_adapters import write_adapter
from tests.support.tiny_models import TinyPair, write_tiny_pair

Path1 = tuple[str | int, ...]


@dataclass
class Params:
    """A runner as ServedWeights uses one."""

    params: Any

    def replace_params(self, params: Any) -> None:
        self.params = params

    def exclusively(self) -> AbstractContextManager[object]:
        return nullcontext()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyPair, TinyPair]:
    ours, theirs = (write_tiny_pair(tmp_path_factory.mktemp(f"p{i}"), seed=i) for i in (0, 4))
    return ours, theirs


def load(shards: int = 1, **arguments: Any) -> LoadedModels:
    args = EngineArgs(dtype="float32", tp_size=shards, **arguments)
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    return load_models(args, resolve_paths(args), mesh=mesh)


def load_pair(pair: TinyPair, shards: int) -> LoadedModels:
    return load(
        shards,
        model_path=str(pair.target_path),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(pair.draft_path),
    )


def serving(models: LoadedModels, **options: Any) -> tuple[ServedWeights, Params]:
    runner = Params(models.params)
    shards = models.target.shard.size
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    return ServedWeights(replace(models, params={}), runner, mesh=mesh, **options), runner


def same(found: Any, wanted: Any) -> None:
    """Assert equal numbers with equal placement."""
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("shards", [1, 4])
def test_every_tensor_is_read_as_it_was_stored(
    pairs: tuple[TinyPair, TinyPair], shards: int
) -> None:
    """Four shards repeat the two kv heads."""
    weights, _ = serving(load_pair(pairs[0], shards))
    for path, model in ((pairs[0].target_path, None), (pairs[0].draft_path, Model.DRAFT)):
        stored = load_file(path / "model.safetensors")
        for name in stored.keys() - {"t2d"}:
            np.testing.assert_array_equal(weights.tensor(name, model), stored[name], strict=True)
    for name, whose in (("layers.1.mlp.up_proj.weight", Model.DRAFT), ("x", None), ("t2d", None)):
        with pytest.raises(RequestError, match="expected a tensor of"):
            weights.tensor(name, whose)


@pytest.mark.parametrize("has_room", [True, False], ids=["beside", "in_place"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_switch_gives_what_a_start_would(
    pairs: tuple[TinyPair, TinyPair], shards: int, has_room: bool
) -> None:
    ours, theirs = pairs
    weights, runner = serving(load_pair(ours, shards), has_room=lambda _: has_room)
    before = jax.tree.leaves(runner.params)
    update = DiskUpdate(target=str(theirs.target_path), draft=str(theirs.draft_path))
    prepared = weights.prepare(update)
    assert all(a is b for a, b in zip(jax.tree.leaves(runner.params), before, strict=True))
    weights.switch(prepared)
    same(runner.params, load_pair(theirs, shards).params)
    assert all(leaf.is_deleted() for leaf in before) is not has_room
    given = load_file(ours.target_path / "model.safetensors")
    weights.switch(weights.prepare(ArrayUpdate(arrays=given)))
    same(runner.params["target"], load_pair(ours, shards).params["target"])


@pytest.mark.parametrize("has_room", [True, False], ids=["beside", "in_place"])
def test_adapters_stay_when_their_target_is_switched(
    pairs: tuple[TinyPair, TinyPair], tmp_path: Path, has_room: bool
) -> None:
    ours, theirs = (pair.target_path for pair in pairs)
    write_adapter(tmp_path / "a", load_file(ours / "model.safetensors"), ("q_proj", "down_proj"))
    models = load(2, model_path=str(ours), enable_lora=True, max_lora_rank=8)
    weights, runner = serving(models, has_room=lambda _: has_room)
    before = runner.params["target"]["lora"]
    weights.switch(weights.prepare(AdapterUpdate(slot=3, path=str(tmp_path / "a"))))
    written = runner.params["target"]["lora"]
    parts = jax.tree.map(lambda new, old: not np.array_equal(new, old), written, before)
    changed = {path for path, is_new in traverse_util.flatten_dict(parts).items() if is_new}
    products = {"qkv", "down"}
    assert {path[-2] if path[-1] == "a" else path[-3] for path in changed} == products
    weights.switch(weights.prepare(DiskUpdate(target=str(theirs))))
    same(runner.params["target"].pop("lora"), written)
    same(runner.params["target"], load(2, model_path=str(theirs)).params["target"])


def test_a_draft_that_is_a_model_of_its_own_is_switched(pairs: tuple[TinyPair, TinyPair]) -> None:
    ours, theirs = (str(pair.target_path) for pair in pairs)
    arguments = {"model_path": ours, "speculative_algorithm": "STANDALONE"}
    weights, runner = serving(load(**arguments, speculative_draft_model_path=theirs))
    weights.switch(weights.prepare(DiskUpdate(draft=ours)))
    same(runner.params, load(**arguments, speculative_draft_model_path=ours).params)
    bad = {"model.layers.0.mlp.up_proj.weight": np.zeros((3, 5), np.float32)}
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape \(3, 5\); expected"):
        weights.prepare(ArrayUpdate(arrays=bad, model=Model.DRAFT))


def test_a_switch_that_fails_half_way_is_undone() -> None:
    old: dict[Path1, Any] = {("a", i): jnp.full(4, float(i)) for i in range(5)}
    old["b", 0] = SameAs(("a", 0))
    new: dict[Path1, Any] = {("a", i): np.full(4, 10.0 + i, np.float32) for i in range(5)}
    new["b", 0] = SameAs(("a", 0))
    calls = 0

    def put(_: Path1, value: HostArray) -> jax.Array:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError("no room")
        return jnp.asarray(value)

    with pytest.raises(SwitchError, match="no room") as caught:
        switch_leaves(old, dict(new), put)
    for path, leaf in caught.value.restored.items():
        np.testing.assert_array_equal(leaf, np.full(4, float(path[1])))
    assert caught.value.restored["b", 0] is caught.value.restored["a", 0]
    done = switch_leaves({**caught.value.restored, ("b", 0): SameAs(("a", 0))}, dict(new), put)
    assert done["b", 0] is done["a", 0]
    np.testing.assert_array_equal(done["a", 3], np.full(4, 13.0))

    def broken(_: Path1, __: HostArray) -> jax.Array:
        raise MemoryError("gone")

    with pytest.raises(EngineClosedError, match=r"could not be put back because of .*gone"):
        switch_leaves({**done, ("b", 0): SameAs(("a", 0))}, dict(new), broken)


@pytest.mark.parametrize("kind", ["own", "embed", "full", "eagle1", "eagle1_map", "mtp"])
def test_a_draft_declares_what_it_shares_with_its_target(
    pairs: tuple[TinyPair, TinyPair], tmp_path: Path, kind: str
) -> None:
    """The declared params are the target's own arrays, and no others are. full: U = V."""
    ours, draft = pairs[0], tmp_path / "draft"
    arguments: dict[str, Any] = {"model_path": str(ours.target_path)}
    if kind == "mtp":
        write_checkpoint(tmp_path, CONFIGS["mimo_v2"])
        models = load(model_path=str(tmp_path), speculative_algorithm="NEXTN")
    else:
        if kind.startswith("eagle1"):
            write_eagle1(draft, ours, seed=1)
        else:
            config = replace(ours.draft_config, draft_vocab_size=320 if kind == "full" else 160)
            params = init_params(head_params(config), seed=0)
            save_eagle3(draft, config, params, dtype=np.float32, include_embed=kind == "own")
        if kind == "full":
            stored = load_file(draft / "model.safetensors")
            del stored["lm_head.weight"]
            save_file(stored, draft / "model.safetensors")
        np.save(tmp_path / "map.npy", np.arange(0, 320, 5))
        models = load(
            speculative_algorithm="EAGLE" if kind.startswith("eagle1") else "EAGLE3",
            speculative_draft_model_path=str(draft),
            speculative_token_map=str(tmp_path / "map.npy") if kind == "eagle1_map" else None,
            **arguments,
        )
    target = {id(leaf) for leaf in jax.tree.leaves(models.params["target"])}
    for name, part in models.params["draft"].items():
        shared = [id(leaf) in target for leaf in jax.tree.leaves(part)]
        assert shared == [name in models.source.shares] * len(shared), name


@pytest.mark.parametrize("has_map", [False, True])
def test_what_a_head_has_of_its_target_follows_it(
    pairs: tuple[TinyPair, TinyPair], tmp_path: Path, has_map: bool
) -> None:
    ours, theirs = pairs
    draft = tmp_path / "draft"
    write_eagle1(draft, ours, seed=1)
    ids = np.arange(0, 320, 5)
    np.save(tmp_path / "map.npy", ids)
    arguments: dict[str, Any] = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(draft),
        "speculative_token_map": str(tmp_path / "map.npy") if has_map else None,
    }
    weights, runner = serving(load(model_path=str(ours.target_path), **arguments))
    weights.switch(weights.prepare(DiskUpdate(target=str(theirs.target_path))))
    wanted = load(model_path=str(theirs.target_path), **arguments).params
    same(runner.params, wanted)
    target, head = runner.params["target"], runner.params["draft"]
    assert head["embed"]["table"] is target["embed"]["table"]
    assert (head["lm_head"]["kernel"] is target["lm_head"]["kernel"]) is not has_map
    write_eagle1(draft, ours, seed=2)
    weights.switch(weights.prepare(DiskUpdate(draft=str(draft))))
    same(runner.params, load(model_path=str(theirs.target_path), **arguments).params)
    table = {"embed_tokens.weight": np.zeros((320, 32), np.float32)}
    with pytest.raises(CheckpointError, match=r"unknown tensor embed_tokens\.weight"):
        weights.prepare(ArrayUpdate(arrays=table, model=Model.DRAFT))


def write_eagle1(path: Path, pair: TinyPair, *, seed: int) -> None:
    config = eagle1_spec(layer=pair.draft_config.layer, draft_vocab_size=320)
    table = tuple(spec for spec in head_params(config) if spec.layouts)
    path.mkdir(exist_ok=True)
    tensors = stored_tensors(table, init_params(table, seed=seed), dtype=np.float32)
    save_file(tensors, path / "model.safetensors")
    fields = json.loads((pair.draft_path / "config.json").read_text())
    kept = {name: fields[name] for name in fields if "draft" not in name and "eagle" not in name}
    values = {**kept, "architectures": ["LlamaForCausalLMEagle"]}
    (path / "config.json").write_text(json.dumps(values))


def test_each_layer_of_a_multi_layer_draft_has_its_own_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["mimo_v2"])
    arguments: dict[str, Any] = {"model_path": str(tmp_path), "speculative_algorithm": "NEXTN"}
    weights, runner = serving(load(**arguments))
    assert weights.draft_is_in_target
    stored = load_file(tmp_path / "model.safetensors")
    layers = [name for name in stored if name.startswith("model.mtp")]
    second = sorted(name for name in layers if ".layers.1." in name)
    before = {name: weights.tensor(name, None) for name in layers}
    assert second
    for name in layers:
        np.testing.assert_array_equal(before[name], stored[name])
    weights.switch(weights.prepare(ArrayUpdate(arrays={n: stored[n] * 2 for n in second})))
    for name in layers:
        times = 2 if name in second else 1
        np.testing.assert_array_equal(weights.tensor(name, Model.DRAFT), before[name] * times)
    save_file({name: value * 0.5 for name, value in stored.items()}, tmp_path / "model.safetensors")
    path = str(tmp_path)
    weights.switch(weights.prepare(DiskUpdate(target=path, draft=path)))
    same(runner.params, load(**arguments).params)
    draft, target = runner.params["draft"], runner.params["target"]
    assert draft["embed"]["table"] is target["embed"]["table"]


@pytest.mark.parametrize(("family", "shards"), [("qwen3_next", 2), ("qwen3_5", 1)])
def test_a_tensor_may_hold_parts_of_several_weights(
    family: str, shards: int, tmp_path: Path
) -> None:
    """Queries and gates in q_proj; a delta net's inputs and gates, or its steps."""
    write_checkpoint(tmp_path, CONFIGS[family])
    arguments: dict[str, Any] = {"model_path": str(tmp_path), "speculative_algorithm": "NEXTN"}
    weights, runner = serving(load(shards, **arguments))
    stored = load_file(tmp_path / "model.safetensors")
    read = [name for name in stored if "visual" not in name]
    for name in read:
        np.testing.assert_array_equal(weights.tensor(name, None), stored[name])
    some = [x for x in read if "q_proj" in x or "in_proj" in x]
    for changed in (some, [x for x in read if not x.startswith("mtp.")]):
        arrays = {name: stored[name] * 2 for name in changed}
        stored |= arrays
        for model in (None,) if changed is not some else (Model.TARGET, Model.DRAFT):
            own = {x: a for x, a in arrays.items() if (model is Model.DRAFT) == ("mtp." in x)}
            weights.switch(weights.prepare(ArrayUpdate(arrays=own, model=model)))
        save_file(stored, tmp_path / "model.safetensors")
        same(runner.params, load(shards, **arguments).params)


def test_a_draft_that_is_not_there_has_no_weights(pairs: tuple[TinyPair, TinyPair]) -> None:
    ours, _ = pairs
    weights, _ = serving(load(model_path=str(ours.target_path)))
    assert not weights.has_draft
    with pytest.raises(ConfigError, match="speculative_algorithm is NONE, without one"):
        weights.prepare(DiskUpdate(draft=str(ours.draft_path)))


def test_what_is_finite() -> None:
    for dtype in (np.float32, jnp.bfloat16, np.float16):
        value = np.zeros((3, 2**20), dtype)
        assert is_finite(value)
        assert is_finite(value.T)
        value[2, -1] = np.nan
        assert not is_finite(value)
        assert not is_finite(value.T)
    assert is_finite(np.zeros(3, np.int32))
