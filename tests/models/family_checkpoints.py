"""The small checkpoints with transformers' outputs, one of each family."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jspec.device.parallel import Parallel, partition_spec
from jspec.device.state import cache_specs
from jspec.layers.linear import Shard
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.layer import Params
from jspec.models.placement import param_specs
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.spec.axes import MODEL
from jspec.spec.expert_shards import on_expert_shards
from jspec.spec.model_spec import cache_groups
from jspec.spec.weight_format import Formats
from tests.support.caches import empty_pools

PAGE, CHUNK = 16, 16
GOLDEN = Path(__file__).parents[1] / "golden" / "families"
FAMILY_CHECKPOINTS = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "mistral",
    "gpt_oss",
    "step3p5",
    "glm4_moe",
    "mimo",
    "mimo_v2",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m2",
    "mistral4",
    "ministral3",
    "gemma4",
    "gemma4_moe",
    "gemma4_unified",
)


def checkpoint_of(name: str, folder: Path) -> Path:
    """Return a family's folder.

    transformers lacks MiMo-7B, whose target is Qwen2's: Qwen2's is written to `folder` under its
    name.
    """
    if name != "mimo":
        return GOLDEN / name
    path = folder / name
    shutil.copytree(GOLDEN / "qwen2", path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def chunked_logits(
    decoder: Decoder, params: Params, kv: Any, token_ids: Any, lora_slots: Any = None
) -> jax.Array:
    """Run a prompt's chunk, then the rest like a verification, over pages."""
    found = []
    length = token_ids.shape[0]
    for start, stop in ((0, CHUNK), (CHUNK, length)):
        rows = AttentionMetadata(
            page_table=jnp.asarray([[2, 1]], jnp.int32),
            prefix_lens=jnp.asarray([start], jnp.int32),
            cu_q_lens=jnp.asarray([0, stop - start], jnp.int32),
            q_positions=jnp.arange(start, stop, dtype=jnp.int32),
            slots=jnp.asarray([1], jnp.int32),
        )
        hidden, _, kv = decoder.forward(
            params,
            token_ids[start:stop],
            kv,
            rows,
            queries_per_row=stop - start if start else None,
            lora_slots=lora_slots,
        )
        found.append(decoder.logits(params, hidden))
    return jnp.concatenate(found)


def logits_over(
    parallel: Parallel, path: Path, token_ids: np.ndarray, *, formats: Formats = ()
) -> jax.Array:
    """Return a checkpoint's logits [T, V] on fake CPU devices, in float32."""
    spec = on_expert_shards(load_model_spec(path), parallel.expert)
    mesh = parallel.mesh(jax.devices("cpu")[: parallel.model])
    decoder = Decoder(spec, OPS["xla"], Shard(parallel.model, MODEL), formats=formats)
    params = load_target(path, spec, dtype=np.float32, shards=parallel.model, formats=formats)
    groups = cache_groups(spec, name="target")
    pools = empty_pools(
        groups,
        num_pages=3,
        page_size=PAGE,
        shards=parallel.model,
        dtype=jnp.float32,
        ops=OPS["xla"],
        num_nodes=len(token_ids) - CHUNK,
    )
    run = jax.jit(
        jax.shard_map(
            partial(chunked_logits, decoder),
            mesh=mesh,
            in_specs=(
                param_specs({"target": decoder.table}, {"target": params})["target"],
                cache_specs(groups),
                PartitionSpec(),
            ),
            out_specs=partition_spec((None, "vocab")),
            check_vma=False,
        )
    )
    with jax.default_matmul_precision("highest"):
        return run(params, pools, jnp.asarray(token_ids, jnp.int32))
