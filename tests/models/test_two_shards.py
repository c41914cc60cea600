"""Two shards give the logits of one, for every family.

The golden logits are those of transformers, which one shard also gives (test_families.py).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspec.device.parallel import Parallel, partition_spec
from jspec.device.state import cache_specs
from jspec.layers.linear import Shard
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.placement import param_specs
from jspec.models.registry import FAMILIES
from jspec.pallas_kernels.bundles import OPS
from jspec.spec.axes import TENSOR
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

# Their layers are split like those of the others.
REPETITIONS = (
    *("qwen2", "qwen3", "qwen3_moe_mixed", "mistral", "mimo"),
    *("qwen3_5", "qwen3_5_moe"),
    *("deepseek_v2", "kimi_k2", "glm4_moe_lite", "mistral4", "ministral3"),
    *("gemma4_moe", "gemma4_unified"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in REPETITIONS else ())
        for name in FAMILY_CHECKPOINTS
    ],
)
def test_two_shards_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    path = checkpoint_of(name, tmp_path)
    spec = load_model_spec(path)
    golden = arrays_of(path / "outputs.npz")
    mesh = Parallel(tensor=2).mesh(jax.devices("cpu")[:2])
    decoder = Decoder(spec, OPS["xla"], Shard(2, TENSOR))
    params = {"target": load_target(path, spec, dtype=np.float32, shards=2)}
    pools = empty_pools(
        cache_groups(spec, name="target"),
        num_pages=3,
        page_size=PAGE,
        shards=2,
        dtype=jnp.float32,
        ops=OPS["xla"],
        num_nodes=len(golden["token_ids"]) - CHUNK,
    )
    run = jax.jit(
        jax.shard_map(
            partial(chunked_logits, decoder),
            mesh=mesh,
            in_specs=(
                param_specs({"target": decoder.table}, params)["target"],
                cache_specs(cache_groups(spec, name="target")),
                PartitionSpec(),
            ),
            out_specs=partition_spec((None, "vocab")),
            check_vma=False,
        )
    )
    with jax.default_matmul_precision("highest"):
        logits = run(params["target"], pools, jnp.asarray(golden["token_ids"], jnp.int32))
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-4, atol=1e-4)


def test_every_family_is_split() -> None:
    """tests/engine/test_runner.py covers Llama."""
    families = {name.removesuffix("_mixed") for name in FAMILY_CHECKPOINTS}
    families -= {"qwen3_5_moe", "kimi_k2", "ministral3", "gemma4_moe", "gemma4_unified"}
    assert families == {family.name for family in FAMILIES} - {"llama"}
