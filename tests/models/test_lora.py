"""A row with a LoRA adapter has the logits of merged weights, in every family, over two shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file

from jspec.device.parallel import Parallel, partition_spec
from jspec.device.state import cache_specs
from jspec.engine.weights.adapters import AdapterSlots, no_adapters
from jspec.layers.linear import Shard
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.lora_params import adaptable_modules, is_adaptable, module_of
from jspec.models.placement import param_specs
from jspec.models.registry import table_of
from jspec.pallas_kernels.bundles import OPS
from jspec.spec.axes import MODEL
from jspec.spec.lora_spec import LoRASpec
from jspec.spec.model_spec import cache_groups
from tests.models.family_checkpoints import (
    CHUNK,
    FAMILY_CHECKPOINTS,
    PAGE,
    checkpoint_of,
    chunked_logits,
)
from tests.support.caches import empty_pools
from tests.support.golden_arrays import arrays_of
from tests.support.lora_adapters import write_adapter, write_merged

FAST = "qwen2"  # fused q, k and v with biases, fused gate and up
# Gates in a projection's rows and recurrent layers; latents; biases, windows.
SLOW = ("qwen3_next", "deepseek_v3", "gpt_oss")


def _marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name == FAST:
        return ()
    return (pytest.mark.slow,) if name in SLOW else (pytest.mark.slow, pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_marks(name)) for name in FAMILY_CHECKPOINTS]
)
def test_an_adapter_gives_the_logits_of_merged_weights(name: str, tmp_path: Path) -> None:
    """Another adapter changes nothing, nor does any the rows without one."""
    path = checkpoint_of(name, tmp_path)
    spec = load_model_spec(path)
    products = [own for own in table_of(spec) if is_adaptable(own)]
    parts = [part for own in products for layout in own.layouts for part in layout]
    modules = {module_of(part) for part in parts}
    base = load_file(path / "model.safetensors")
    merged = write_adapter(tmp_path / "own", base, modules, rank=3, seed=1)
    write_adapter(tmp_path / "other", base, modules, rank=4, seed=2)
    assert merged

    lora = LoRASpec(num_loras=2, rank=4, modules=adaptable_modules(table_of(spec)))
    decoder = Decoder(spec, OPS["xla"], Shard(2, MODEL), lora=lora)
    mesh = Parallel(tensor=2).mesh(jax.devices("cpu")[:2])
    slots = AdapterSlots(decoder, mesh=mesh, dtype=np.float32)
    load = partial(load_target, spec=spec, dtype=np.float32, shards=2)
    params = load(path) | no_adapters(decoder, mesh=mesh, dtype=np.float32)
    for slot, folder in ((1, "other"), (2, "own")):
        params = slots.written(params, slot, slots.read(str(tmp_path / folder)))

    golden = arrays_of(path / "outputs.npz")
    pools = empty_pools(
        cache_groups(spec, name="target"),
        num_pages=3,
        page_size=PAGE,
        shards=2,
        dtype=jnp.float32,
        ops=OPS["xla"],
        num_nodes=len(golden["token_ids"]) - CHUNK,
    )
    tables = {"target": decoder.table}
    run = jax.jit(
        jax.shard_map(
            partial(chunked_logits, decoder),
            mesh=mesh,
            in_specs=(
                param_specs(tables, {"target": params})["target"],
                cache_specs(cache_groups(spec, name="target")),
                PartitionSpec(),
                PartitionSpec(),
            ),
            out_specs=partition_spec((None, "vocab")),
            check_vma=False,
        )
    )

    def logits(params: object, slot: int) -> np.ndarray:
        ids = jnp.asarray(golden["token_ids"], jnp.int32)
        with jax.default_matmul_precision("highest"):
            return np.asarray(run(params, pools, ids, jnp.asarray([slot], jnp.int32)))

    np.testing.assert_allclose(logits(params, 0), golden["logits"], rtol=1e-4, atol=1e-4)
    whole = load(write_merged(tmp_path / "merged", path, merged)) | {"lora": params["lora"]}
    wanted = logits(whole, 0)
    assert np.abs(wanted - golden["logits"]).max() > 0.1
    np.testing.assert_allclose(logits(params, 2), wanted, rtol=1e-3, atol=1e-3)
