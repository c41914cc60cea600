"""Decode steps of hybrid and latent-attention targets, by backend, with floors and kernels.

    python -m benchmarks.hybrid_steps [--models qwen3.5-9b] [--cells 'tree/*'] [--backends xla auto]
    python -m benchmarks.hybrid_steps --models tiny-hybrid tiny-latent     (a smoke test on a CPU)

Targets are the first layers of published models at full width, with random weights, and draft with
their own layer for multi-token prediction: chain 3/1/4 and tree 3/4/16, at a simulated acceptance
of 3.0. A cell is one decode program dispatched back to back. The floor: weights read once per
forward, or multiplied where that takes longer, recurrent states read and written once, and cached
tokens read once. --trace lists the largest kernels of a step (with
XLA_FLAGS=--xla_gpu_enable_command_buffer= each has its name).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from benchmarks.environment import write_result
from benchmarks.floors import experts_touched
from benchmarks.h200_table import describe_error
from benchmarks.step_profile import Bench, prepare, whole_step
from benchmarks.step_timing import largest_kernels
from benchmarks.timing import FLOPS_PER_SECOND, READ_BYTES_PER_SECOND
from benchmarks.workloads import MODES, QWEN3_5_9B_JSON
from jspec.engine.programs.compilation import compile_all
from jspec.engine.runner import init_state
from jspec.engine.steps.step_def import ProgramKey
from jspec.messages.plan import StepKind
from jspec.messages.step_options import PLAIN
from jspec.models.params import Init, ParamTable
from jspec.spec.cache_entry import CacheLayout, Unit, bytes_per_unit
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.weight_format import itemsize, num_bytes

ROOT = Path(__file__).resolve().parent.parent

GLM_4_7_FLASH_JSON: Mapping[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "eos_token_id": 154820,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
QWEN3_6_35B_A3B_JSON: Mapping[str, Any] = {
    **QWEN3_5_9B_JSON,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
TINY_HYBRID_JSON: Mapping[str, Any] = {
    **QWEN3_5_9B_JSON,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 319,
    "vocab_size": 320,
}
TINY_LATENT_JSON: Mapping[str, Any] = {
    **GLM_4_7_FLASH_JSON,
    "hidden_size": 32,
    "intermediate_size": 64,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "eos_token_id": 319,
    "vocab_size": 320,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayers:
    """A target that drafts with its own layer; a Workload as far as step_profile knows.

    full_layers: of the published model, of which config has the first.
    """

    config: Mapping[str, Any]
    num_layers: int
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 8, 64)
    prompt_len: int = 1024
    long_run: int = 288
    engine: Mapping[str, Any] = field(
        default_factory=lambda: {"context_length": 8448, "max_total_tokens": 64 * 1408}
    )

    def write_configs(self, directory: Path) -> None:
        target = directory / "target"
        target.mkdir(parents=True, exist_ok=True)
        config = {**self.config, "num_hidden_layers": self.num_layers, "torch_dtype": self.dtype}
        (target / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def arguments(self, mode: str, directory: Path, *, acceptance: float) -> dict[str, Any]:
        shared = {
            "model_path": str(directory / "target"),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "max_running_requests": max(self.batches),
            "disable_radix_cache": True,
            "compile_at_start": "common",
            **self.engine,
        }
        shape = MODES[mode]
        if shape is None:
            return {**shared, "speculative_algorithm": "NONE"}
        steps, topk, nodes = shape
        return {
            **shared,
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
            "simulate_acceptance": acceptance,
        }


_TINY: Any = {
    "dtype": "float32",
    "batches": (1, 2),
    "prompt_len": 24,
    "long_run": 25,
    "engine": {"context_length": 128, "max_total_tokens": 512, "chunked_prefill_size": 32},
}
TARGETS: Mapping[str, OwnLayers] = {
    "qwen3.5-9b": OwnLayers(config=QWEN3_5_9B_JSON, num_layers=8),
    "qwen3.6-35b-a3b": OwnLayers(config=QWEN3_6_35B_A3B_JSON, num_layers=8),
    "glm-4.7-flash": OwnLayers(config=GLM_4_7_FLASH_JSON, num_layers=5),
    "tiny-hybrid": OwnLayers(config=TINY_HYBRID_JSON, num_layers=4, **_TINY),
    "tiny-latent": OwnLayers(config=TINY_LATENT_JSON, num_layers=2, **_TINY),
}


def weights_ms(
    table: ParamTable, experts: Mapping[int, MoESpec], *, dtype: str, tokens: int, head_tokens: int
) -> float:
    """Return the sum over weights of reading or of multiplying, whichever takes longer.

    Experts count as far as the tokens touch them; embeddings are indexed. head_tokens: those that
    lm_head scores.
    """
    total = 0.0
    for weight in table:
        if weight.init in (Init.TABLE, Init.IDS):
            continue
        size = float(num_bytes(weight.format_in(dtype), weight.shape))
        flops = 2.0 * math.prod(weight.shape) * tokens if len(weight.shape) > 1 else 0.0
        if "lm_head" in weight.path:
            flops *= head_tokens / tokens
        if "experts" in weight.path:
            moe = experts[int(weight.path[1])]
            size *= experts_touched(moe, tokens=tokens) / moe.num_experts
            flops *= moe.top_k / moe.num_experts
        total += max(size / READ_BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
    return 1e3 * total


def cache_bytes(groups: Iterable[CacheGroup], *, batch: int, context: int, dtype: str) -> float:
    """Return the bytes of the caches that a forward must move: states twice, tokens once."""
    layout = CacheLayout(page_size=1, dtype=dtype)
    total = 0.0
    for group in groups:
        if group.entry.unit is Unit.PAGE:
            each = context * bytes_per_unit(group.entry, layout)
        else:
            arrays = group.entry.snapshot.arrays(1, layout)
            each = 2 * sum(math.prod(x.shape) * itemsize(x.dtype) for x in arrays.values())
        total += batch * group.num_layers * each
    return total


def floor_ms(bench: Bench, batch: int) -> dict[str, float]:
    """Return the least milliseconds of target and drafter, each forward for itself."""
    models, shape = bench.models, bench.program.draft_shape
    dtype, target = bench.dtype.name, models.target
    sizes: Any = {"batch": batch, "context": bench.committed, "dtype": dtype}
    experts = {i: x.ffn for i, x in enumerate(target.spec.layers) if isinstance(x.ffn, MoESpec)}
    tokens = batch * shape.num_draft_tokens
    caches = cache_bytes(target.cache_groups, **sizes)
    how: Any = {"dtype": dtype, "tokens": tokens, "head_tokens": tokens}
    found = {
        "weights": weights_ms(target.table, experts, **how),
        "caches": 1e3 * caches / READ_BYTES_PER_SECOND,
        "draft": 0.0,
    }
    if shape.num_steps:
        drafter: Any = models.drafter
        layers = enumerate(drafter.model.spec.layer.layers)
        own = {i: layer.ffn for i, layer in layers if isinstance(layer.ffn, MoESpec)}
        read = 1e3 * cache_bytes(drafter.cache_groups, **sizes) / READ_BYTES_PER_SECOND
        first = (batch * shape.max_emitted, batch)  # advance scores a row's last token alone
        for count, scored in (first, *[(batch * shape.topk,) * 2] * (shape.num_steps - 1)):
            how = {"dtype": dtype, "tokens": count, "head_tokens": scored}
            found["draft"] += weights_ms(drafter.table, own, **how) + read
    return {name: round(ms, 4) for name, ms in {"ms": sum(found.values()), **found}.items()}


def decode_programs(bench: Bench) -> Bench:
    """Compile the plain decode program of each batch."""
    program, limits = bench.program, bench.limits
    state = jax.eval_shape(lambda: init_state(program, limits, shards=1, kv_dtype=bench.dtype))
    keys = tuple(
        ProgramKey(StepKind.DECODE, batch, PLAIN) for batch in limits.programs.decode_buckets
    )
    made = compile_all(
        program, limits, mesh=bench.mesh, params=bench.models.params, state=state, keys=keys
    )
    return replace(bench, executables=made)


def run_mode(
    name: str, mode: str, backend: str, options: argparse.Namespace, put: Callable[..., None]
) -> None:
    """Measure the requested batches of one mode on one backend."""
    target: Any = TARGETS[name]
    batches = tuple(
        b
        for b in target.batches
        if any(fnmatch(f"{mode}/{b}", pattern) for pattern in options.cells)
    )
    if not batches:
        return
    if options.layers:
        target = replace(target, num_layers=options.layers)
    engine = {"attention_backend": backend, "compilation_cache_dir": ""}
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        first = prepare(target, mode, max(batches), Path(folder), engine, smaller=batches[:-1])
        bench = decode_programs(first)
        seconds = time.monotonic() - started
        print(f"{name} {mode} {backend}: ready in {seconds:.1f} s", flush=True)
        for batch in batches:
            cell: dict[str, Any] = {"model": name, "backend": backend, "mode": mode, "batch": batch}
            cell |= {"layers": target.num_layers, "ops": bench.models.target.ops.name}
            try:
                if time.monotonic() > options.deadline:
                    raise TimeoutError("out of time")
                ms, run = whole_step(bench, batch)
                floor = floor_ms(bench, batch)
                cell |= {"ms": round(ms, 4), "floor": floor, "share": round(floor["ms"] / ms, 3)}
                if options.trace:
                    cell["kernels"] = largest_kernels(run)
            except Exception as error:  # the other cells are still wanted
                cell["error"] = describe_error(error)
            put(cell)
    gc.collect()


def table(cells: list[dict[str, Any]]) -> str:
    """Return Markdown: each cell's milliseconds, its floor and the share of it."""
    lines = ["| model | cell | backend | ms | floor | share |", "|---|---|---|---|---|---|"]
    for cell in cells:
        if "error" in cell:
            figures = f"{cell['error'][:60]} | | "
        else:
            figures = f"{cell['ms']:.3f} | {cell['floor']['ms']:.3f} | {100 * cell['share']:.0f}%"
        name = f"{cell['mode']}/{cell['batch']}"
        lines.append(f"| {cell['model']} | {name} | {cell['backend']} | {figures} |")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--models", nargs="+", choices=sorted(TARGETS), default=["qwen3.5-9b", "glm-4.7-flash"]
    )
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="MODE/B")
    parser.add_argument("--backends", nargs="+", default=["auto"], choices=("auto", "xla"))
    parser.add_argument("--layers", type=int, help="of each target; unset: some of the published")
    parser.add_argument("--trace", action="store_true", help="list the largest kernels too")
    parser.add_argument("--seconds", type=float, default=540.0, help="no cell starts after this")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every requested cell has its figures."""
    options = parse(sys.argv[1:] if argv is None else argv)
    options.deadline = time.monotonic() + options.seconds
    output = options.output or ROOT / "benchmarks" / "results" / "hybrid_steps.json"
    cells: list[dict[str, Any]] = []

    def put(cell: dict[str, Any]) -> None:
        cells.append(cell)
        shown = {name: value for name, value in cell.items() if name != "kernels"}
        print(json.dumps(shown), flush=True)
        for row in cell.get("kernels", ()):
            print(f"    {row[0]:9.4f} ms {row[1]:7.1f} x {row[2]}", flush=True)
        write_result(output, {"cells": cells})

    for name in options.models:
        for mode in MODES:
            for backend in options.backends:
                try:
                    run_mode(name, mode, backend, options, put)
                except Exception as error:  # the other modes are still wanted
                    what = {"model": name, "backend": backend, "mode": mode, "batch": 0}
                    put({**what, "error": describe_error(error)})
    print(table(cells))
    return 1 if not cells or any("error" in cell for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
