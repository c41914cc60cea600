"""Compiles the experts' kernel with the real TPU compiler; run in a process of its own.

    python -m tests.pallas_kernels.tpu_experts_compile TOPOLOGY

Prints one JSON line a shape: its name, seconds, how often it calls the kernel, and the bytes that
it needs beside its arguments. There is no TPU here: this shows that shapes compile, not that they
run.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# The compiler needs no chip: it may run beside another load, whoever owns the lock file in /tmp.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jspec.pallas_kernels.ops_tpu import TpuOps
from jspec.pallas_kernels.shapes import GPT_OSS_20B, QWEN3_30B_A3B
from jspec.spec.model_spec import MoESpec

SHAPES = {
    **{f"qwen3-30b-a3b, {tokens} tokens": (QWEN3_30B_A3B, tokens) for tokens in (1, 64, 256)},
    **{f"gpt-oss-20b, {tokens} tokens": (GPT_OSS_20B, tokens) for tokens in (1, 256)},
    "qwen3-30b-a3b tp4, 8 tokens": (QWEN3_30B_A3B.shard(4), 8),
    "gpt-oss-20b tp4, 8 tokens": (GPT_OSS_20B.shard(4), 8),
    "by XLA, 2048 tokens": (QWEN3_30B_A3B, 2048),
}


def main(topology: str) -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    array = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
    for name, (shape, tokens) in SHAPES.items():
        spec, E = shape.ffn, shape.hidden_size
        assert isinstance(spec, MoESpec)
        params = {
            key: array(of_weight, jnp.bfloat16)
            for key, of_weight in shape.moe_params["experts"].items()
            if key != "down_bias"
        }
        started = time.monotonic()
        run = jax.jit(partial(TpuOps().experts, gate=spec.gate))
        lowered = run.lower(
            array((tokens, E), jnp.bfloat16),
            array((tokens, spec.top_k), jnp.int32),
            array((tokens, spec.top_k), jnp.float32),
            params,
        )
        compiled = lowered.compile()
        weights = sum(x.size * 2 for x in params.values())
        result = {
            "name": name,
            "seconds": round(time.monotonic() - started, 1),
            "kernels": lowered.as_text().count("@tpu_custom_call"),
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "weight_bytes": weights,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
