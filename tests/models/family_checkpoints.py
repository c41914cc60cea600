"""The small checkpoints with transformers' outputs, one of each family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.decoder import Decoder, Params
from jspec.pallas_kernels.attention.api import AttentionMetadata

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
