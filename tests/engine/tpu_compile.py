"""Compiles step programs ahead of time with the real TPU compiler; run in a process of its own.

    python -m tests.engine.tpu_compile TOPOLOGY MODEL S K N

Prints one JSON line a program: what it is, seconds, lines that copy a KV pool, and the bytes that
one device needs. There is no TPU here: this shows that programs compile and fit, not that they run.
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

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jspec.core import sharding
from jspec.core.config import (
    Algorithm,
    Eagle3Config,
    RopeConfig,
    ServeLimits,
    SpeculativeConfig,
    TransformerConfig,
)
from jspec.core.plan import StepKind
from jspec.engine.compilation import describe, lower
from jspec.engine.runner import init_state
from jspec.layers.linear import Shard
from jspec.models.paged import PagedEagle3, PagedLlama
from jspec.speculative.draft import Drafter, EagleDrafter, NoDrafter
from jspec.speculative.step import StepProgram
from tests.engine.pool_copies import pool_copies

MODELS = {
    "small": TransformerConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=7,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
    ),
    "llama-3.1-8b": TransformerConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(theta=500000.0, factor=8.0),
    ),
}


def main(topology: str, model: str, num_steps: int, topk: int, num_draft_tokens: int) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = sharding.make_mesh(list(devices))
    shard, config = Shard(mesh.size, sharding.TENSOR_AXIS), MODELS[model]
    spec = SpeculativeConfig.plain()
    drafter: Drafter = NoDrafter()
    params: dict[str, object] = {"draft": {}}
    aux: tuple[int, ...] = ()
    if num_steps:
        spec = SpeculativeConfig(
            algorithm=Algorithm.EAGLE3,
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
        )
        aux = Eagle3Config.default_aux_layer_ids(config.num_layers)
        draft_config = Eagle3Config(
            layer=dataclasses.replace(config, num_layers=1),
            draft_vocab_size=min(32000, config.vocab_size // 2),
            target_hidden_size=config.hidden_size,
            aux_layer_ids=aux,
        )
        head, params["draft"] = PagedEagle3.create(draft_config, shard=shard, dtype=jnp.bfloat16)
        drafter = EagleDrafter(head, spec)
    target, params["target"] = PagedLlama.create(
        config, shard=shard, dtype=jnp.bfloat16, aux_layer_ids=aux
    )
    limits = ServeLimits(
        spec=spec,
        num_slots=8,
        num_pages=1024,
        page_size=16,
        context_length=2048,
        decode_buckets=(8,),
        prefill_buckets=(256,),
        prefill_rows=4,
    )
    program = StepProgram(target=target, drafter=drafter, spec=spec, full=False)
    state = jax.eval_shape(
        lambda: init_state(program, limits, shards=mesh.size, kv_dtype=jnp.bfloat16)
    )
    for key in ((StepKind.DECODE, 8, False), (StepKind.PREFILL, 256, True)):
        started = time.monotonic()
        static = dataclasses.replace(program, full=key[2])
        compiled = lower(key, static, limits, mesh=mesh, params=params, state=state).compile()
        num_pages, page_size, heads, width = state.kv[0].shape
        local = (num_pages, page_size, heads // mesh.size, width)
        memory = compiled.memory_analysis()
        total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        result = {
            "program": describe(key),
            "seconds": round(time.monotonic() - started, 1),
            "pool_copies": pool_copies(compiled.as_text(), local),
            "device_bytes": total,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(arg) for arg in sys.argv[3:6]))
