"""Compile step programs ahead of time for chips that are absent, in a separate process.

    python -m tests.engine.step_compile llama-3.1-8b v5e:2x2 0/1/1 3/1/4 3/4/16 --page-size 16
    python -m tests.engine.step_compile gpt-oss-20b tpu7x:2x2x1 3/1/4 --layers 2 --backend tpu
    python -m tests.engine.step_compile llama-3.1-8b h200 3/4/16 --backend gpu --only 'decode*'
    python -m tests.engine.step_compile mimo-v2-flash v5p:2x2x1 3/1/4 --layers 2 --drafter mtp
    python -m tests.engine.step_compile llama-3.1-8b v6e:2x2 7/8/64 --drafter dspark --backend tpu

It compiles, for each S/K/N, every program of an engine with one bucket of each kind: one prefill
chunk, and decode over all slots without and with filters and penalties, with a pool that fills the
chips' memory. It prints one JSON line per program: name, seconds, bytes per device, and the lines
that copy a KV pool or rewrite a weight. This shows that programs compile and fit, not that they
run.
"""

from __future__ import annotations

import os

from tests.support.flat_limits import flat_limits, with_limits

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# The compiler needs no chip: it may run beside another load, whoever owns the lock file in /tmp.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import argparse
import dataclasses
import json
import re
import tempfile
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.workloads import (
    GLM_5_2,
    GPT_OSS_20B,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    MIMO_V2_FLASH,
    QWEN3_5_9B,
    QWEN3_30B_A3B,
    block_json,
    draft_of,
    eagle1_of,
    mtp_of,
    own_layers_of,
)
from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig
from jspec.device.parallel import Parallel, shardings
from jspec.device.state import state_specs
from jspec.engine.programs.compilation import compiler_options, lower
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.runner import init_state
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.transfer import shape_of
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.models.decoder import Decoder
from jspec.models.heads.block_config import load_block_config
from jspec.models.heads.block_head import BlockHead
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.placement import abstract_params, param_specs
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.ops import Ops
from jspec.spec.axes import MODEL
from jspec.spec.block_spec import BlockSpec
from jspec.spec.expert_shards import on_expert_shards
from jspec.spec.head_spec import default_aux_layer_ids
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.spec.weight_format import QUANTIZATIONS, Formats, Op
from jspec.speculative.drafter import Drafter, NoDrafter
from jspec.speculative.drafters.block import BlockDrafter, ParallelDrafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ngram import NgramDrafter
from jspec.speculative.drafters.ranked import EagleDrafter, StandaloneDrafter
from jspec.speculative.step import StepProgram
from tests.engine.pool_copies import pool_copies
from tests.engine.product_types import product_types
from tests.engine.step_watch import watched
from tests.engine.weight_copies import weight_copies
from tests.pallas_kernels.gpu_kernel_compile import H200

GIB = 1 << 30
HBM_BYTES = {  # of a device, as the TPU compiler reports it, rounded down
    "v5e": 63 * GIB // 4,
    "v5p": 95 * GIB,
    "v6e": 125 * GIB // 4,
    "tpu7x": 379 * GIB // 4,
    "h200": 141 * 10**9,
}
STATIC_FRACTION = 0.9  # of it, for weights and pool; the rest is for a step's scratch

MODELS = {
    "small": uniform_decoder(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=7,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
    ),
    "llama-3.1-8b": LLAMA_8B,
    "llama-3.1-70b": LLAMA_70B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "mimo-v2-flash": MIMO_V2_FLASH,
    "qwen3.5-9b": QWEN3_5_9B,
    "glm-5.2": GLM_5_2,
}
ALGORITHMS = {
    "eagle3": Algorithm.EAGLE3,
    "eagle1": Algorithm.EAGLE,
    "mtp": Algorithm.MULTI_LAYER_EAGLE,
    "nextn": Algorithm.NEXTN,
    "peagle": Algorithm.EAGLE3,
    "standalone": Algorithm.STANDALONE,
    "ngram": Algorithm.NGRAM,
    "dflash": Algorithm.DFLASH,
    "dflash2": Algorithm.DFLASH,
    "dspark": Algorithm.DFLASH,
}
BLOCKS: dict[str, dict[str, Any]] = {  # config.json of a block of 8 rows, with published sizes
    "dflash": {},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
    "dspark": {"projector_type": "dspark", "markov_rank": 256},
}


def first_layers(model: ModelSpec, count: int | None) -> ModelSpec:
    """Cut the model to its first `count` layers, at full width; None: all of them."""
    if count is not None and not 2 <= count <= model.num_layers:
        raise ConfigError(f"--layers is {count}; expected 2 to {model.num_layers}, or no such word")
    return dataclasses.replace(model, layers=model.layers[:count])


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return three layers that feed an EAGLE-3 head; of a shortened model the first, middle and
    last."""
    if num_layers < 7:
        return 0, num_layers // 2, num_layers
    return default_aux_layer_ids(num_layers)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The programs of one model and S/K/N on one slice, with abstract arguments."""

    mesh: Mesh
    program: StepProgram
    limits: ServeLimits
    params: Any
    state: Any

    def local(self, tree: Any, specs: Any) -> list[jax.ShapeDtypeStruct]:
        """Return one device's part of each array of `tree`."""
        placed = shardings(self.mesh, specs)
        return jax.tree.leaves(
            jax.tree.map(
                lambda x, at: jax.ShapeDtypeStruct(at.shard_shape(x.shape), x.dtype), tree, placed
            )
        )

    def local_weights(self) -> list[jax.ShapeDtypeStruct]:
        return self.local(self.params, param_specs(self.program.tables, self.params))

    def local_pools(self) -> list[jax.ShapeDtypeStruct]:
        target, drafter = self.program.target, self.program.drafter
        specs = state_specs(self.state, target.cache_groups, drafter.cache_groups)
        pools = (self.state.kv, self.state.draft_kv)
        return self.local(pools, (specs.kv, specs.draft_kv))

    def with_pages(self, num_pages: int) -> Case:
        limits = with_limits(self.limits, num_pages=num_pages)
        state = jax.eval_shape(
            partial(init_state, self.program, limits, shards=self.mesh.size, kv_dtype=jnp.bfloat16)
        )
        return dataclasses.replace(self, limits=limits, state=state)


def make_case(
    model: ModelSpec,
    topology: str,
    shape: str,
    *,
    page_size: int,
    ops: Ops,
    num_rounds: int = 1,
    drafter: str = "eagle3",
    rows: int = 64,
    experts: int = 1,
    quantization: str | None = None,
) -> Case:
    """Build one model with S/K/N and as many pages as a chip's memory allows.

    experts: groups of devices with their own experts. quantization: of the target, as the flag.
    """
    devices = list(devices_of(topology))
    mesh = Parallel(expert=experts, tensor=len(devices) // experts).mesh(devices)
    model = on_expert_shards(model, experts)
    ops = ops.on(devices[0].device_kind)
    how: Any = {"ops": ops, "drafter": drafter, "quantization": quantization}
    program, params = make_program(model, shape, shards=mesh.size, **how)
    limits = flat_limits(
        draft_shape=program.draft_shape,
        num_slots=rows,
        num_pages=8192,
        page_size=page_size,
        context_length=8192,
        decode_buckets=(rows,),
        prefill_buckets=(1920,),  # no width of a model: its activations are not like weights
        prefill_rows=16,
        num_rounds=num_rounds,
    )
    case = Case(mesh=mesh, program=program, limits=limits, params=params, state=None)
    case = case.with_pages(limits.pool.num_pages)
    weights, pools = num_bytes(case.local_weights()), num_bytes(case.local_pools())
    room = int(hbm_bytes(topology) * STATIC_FRACTION) - weights
    return case.with_pages(limits.pool.num_pages * room // pools)


def devices_of(topology: str) -> list[Any]:
    """Return a TPU slice by name, or "h200", or "h200:2" for two of one host.

    The GPUs need the jax-cuda13 plugin and ptxas.
    """
    name, _, number = topology.partition(":")
    if name == "h200":
        described = topologies.get_topology_desc(
            name, "cuda", target_config=H200, topology=f"1x1x{number or 1}"
        )
    else:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return list(described.devices)


def hbm_bytes(topology: str) -> int:
    return HBM_BYTES[topology.partition(":")[0]]


def num_bytes(arrays: list[jax.ShapeDtypeStruct]) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


def make_program(
    config: ModelSpec,
    shape: str,
    *,
    shards: int,
    ops: Ops,
    drafter: str,
    quantization: str | None = None,
) -> tuple[StepProgram, Any]:
    """Return the static program and its abstract bf16 parameters. drafter: one of ALGORITHMS."""
    num_steps, topk, num_draft_tokens = (int(n) for n in shape.split("/"))
    shard = Shard(shards, MODEL)
    ops = ops.with_columns(num_steps > 0)  # as an engine has it
    draft_shape = SpeculativeConfig.plain()
    made: Drafter = NoDrafter()
    if num_steps:
        draft_shape = SpeculativeConfig(
            algorithm=ALGORITHMS[drafter],
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
        )
        made = _drafter(drafter, config, draft_shape, ops=ops, shard=shard)
    formats: Formats = ()
    if quantization is not None:
        formats = tuple((op, QUANTIZATIONS[quantization]) for op in (Op.LINEAR, Op.GATED))
    target = Decoder(config, ops, shard, made.needs.aux_layer_ids, formats=formats)
    program = StepProgram(target=target, drafter=made, draft_shape=draft_shape)
    params = {
        name: abstract_params(table, dtype=jnp.bfloat16, shards=shards)
        for name, table in program.tables.items()
    }
    return program, params


def _drafter(
    kind: str, config: ModelSpec, draft_shape: SpeculativeConfig, *, ops: Ops, shard: Shard
) -> Drafter:
    """Return a drafter at the target's widths; multi-token layers are the family's own, if any."""
    if kind == "ngram":
        return NgramDrafter(draft_shape)
    if kind == "standalone":
        return StandaloneDrafter(Decoder(LLAMA_1B, ops, shard), draft_shape)
    if kind == "eagle1":
        return EagleDrafter(FeatureHead(eagle1_of(config), ops, shard), draft_shape)
    if kind == "mtp":
        own = config.family == MIMO_V2_FLASH.family
        layers = own_layers_of(config) if own else mtp_of(config, num_layers=draft_shape.num_steps)
        return MultiLayerDrafter(FeatureHead(layers, ops, shard), draft_shape)
    if kind in BLOCKS:
        return BlockDrafter(BlockHead(_block_of(kind, config), ops, shard), draft_shape)
    if kind == "nextn":
        return EagleDrafter(FeatureHead(own_layers_of(config), ops, shard), draft_shape)
    aux = aux_layers(config.num_layers)
    head = draft_of(config, draft_vocab_size=min(32000, config.vocab_size // 2), aux=aux)
    if kind == "peagle":
        head = dataclasses.replace(head, mask_token_id=config.vocab_size - 1)
        return ParallelDrafter(FeatureHead(head, ops, shard), draft_shape)
    return EagleDrafter(FeatureHead(head, ops, shard), draft_shape)


def _block_of(kind: str, target: ModelSpec) -> BlockSpec:
    """Return a block drafter's model as its reader makes it."""
    with tempfile.TemporaryDirectory() as folder:
        written = json.dumps(block_json(target, block_size=8, **BLOCKS[kind]))
        (Path(folder) / "config.json").write_text(written)
        return load_block_config(Path(folder), target=target)


def compile_one(case: Case, key: ProgramKey) -> dict[str, Any]:
    """Compile one program and return the observations."""
    started = time.monotonic()
    program = dataclasses.replace(case.program, options=key.options)
    platform = case.mesh.devices.flat[0].platform
    shape = shape_of(key, case.limits)
    compiled = lower(shape, program, mesh=case.mesh, params=case.params, state=case.state).compile(
        compiler_options=compiler_options(key, case.limits, platform=platform, ops=program.ops)
    )
    seconds = time.monotonic() - started
    text, memory = compiled.as_text(), compiled.memory_analysis()
    pools = case.local_pools()
    shapes = {x.shape for x in pools if len(x.shape) > 2}  # not accepted paths, which are tiny
    weights = {x.shape for x in case.local_weights() if len(x.shape) >= 2}
    unshared = memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return {
        "program": str(key),
        "seconds": round(seconds, 1),
        "device_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes + unshared + code,
        "temp_bytes": memory.temp_size_in_bytes,
        "pool_bytes": num_bytes(pools),
        "num_pages": case.limits.pool.num_pages,
        "pool_copies": [x for pool in sorted(shapes) for x in pool_copies(text, pool)],
        "weight_copies": weight_copies(text, weights),
        "watched": watched(text),
        "products": product_types(text),
        "kernels": len(re.findall(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"', text)),
    }


def main(options: argparse.Namespace) -> None:
    """Compile one program after the other: libtpu crashed or hung with several at once."""
    model = first_layers(MODELS[options.model], options.layers)
    for shape in options.shapes:
        case = make_case(
            model,
            options.topology,
            shape,
            page_size=options.page_size,
            ops=OPS[options.backend],
            num_rounds=options.num_continuous_decode_steps,
            drafter=options.drafter,
            rows=options.rows,
            experts=options.experts,
            quantization=options.quantization,
        )
        what = {"topology": options.topology, "model": options.model, "shape": shape}
        what |= {"layers": model.num_layers, "devices": case.mesh.size, "experts": options.experts}
        for key in program_keys(case.limits):
            if fnmatch(str(key), options.only):
                seen = {"hbm_bytes": hbm_bytes(options.topology), **compile_one(case, key)}
                print(json.dumps({**what, **seen}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("topology")
    parser.add_argument("shapes", nargs="+", metavar="S/K/N")
    parser.add_argument("--layers", type=int, metavar="N", help="the model's first N; all else")
    parser.add_argument("--experts", type=int, default=1, metavar="N", help="as --ep-size")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="programs so called")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--backend", default="xla", choices=OPS)
    parser.add_argument("--rows", type=int, default=64, help="B of the decode programs")
    parser.add_argument("--drafter", default="eagle3", choices=ALGORITHMS)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the target")
    parser.add_argument("--num-continuous-decode-steps", type=int, default=1)
    main(parser.parse_args())
