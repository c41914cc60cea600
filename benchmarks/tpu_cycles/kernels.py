"""Reports of the TPU kernels from their final bundles: the inner loop, and simulated times.

A case is a shape of tests.pallas_kernels.tpu_compile with scalar operands for the simulator: row
lengths and page tables of attention, plans of a prefill, the experts that tokens choose.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tpu_cycles.bundles import inner_loop, read
from benchmarks.tpu_cycles.chips import chip_of
from benchmarks.tpu_cycles.scalar_core import Core, Program, Words
from benchmarks.tpu_programs import ROOT

ROWS, PAGE_SIZE, PAGES_PER_ROW = 64, 64, 128
CONTEXTS = (1000, 1024, 4000, 8000)  # 1,024: the new token begins a block of keys
# A step's rows: spread evenly over 512 to 1,536, and prime to the sizes of pages and blocks.
MIXED, MIXED_CONTEXTS = "512 to 1,536 keys", [512 + (i * 613) % 1025 for i in range(ROWS)]
FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=final_bundles "
    "--xla_mosaic_enable_llo_source_annotations=true"
)
LISTING = "-01-final_bundles.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run: words of scalar operands, and the bytes and flops that no kernel can do without."""

    name: str
    operands: Mapping[int, Words]
    floor_bytes: float
    floor_flops: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape by its name in tests.pallas_kernels.tpu_compile. kernel: how its listing begins."""

    name: str
    kernel: str
    scenarios: Callable[[], list[Scenario]]


def attention(queries: int, *, kv_heads: int = 2) -> Callable[[], list[Scenario]]:
    """Return rows of equal contexts, and of mixed ones: what a step with `queries` queries reads.

    Operands: committed keys, keys with this call's, first visible key, q, the page table.
    """
    token_bytes = 2 * kv_heads * 128 * 2

    def scenario(name: str, contexts: list[int]) -> Scenario:
        limits = [n + queries for n in contexts]
        operands: dict[int, Words] = {0: contexts, 1: limits, 2: [0] * ROWS, 4: 1}
        return Scenario(
            name=name, operands=operands, floor_bytes=float(sum(contexts) * token_bytes)
        )

    def made() -> list[Scenario]:
        equal = [scenario(f"{n:,} keys", [n] * ROWS) for n in CONTEXTS]
        return [*equal, scenario(MIXED, MIXED_CONTEXTS)]

    return made


def prefill(tokens: int) -> list[Scenario]:
    """Return one prompt of `tokens` without a prefix, and one that follows as many tokens."""
    import jax.numpy as jnp
    import numpy as np

    from jspec.pallas_kernels.attention.api import AttentionMetadata
    from jspec.pallas_kernels.prefill.api import join_spans, plan_packed
    from jspec.pallas_kernels.prefill.tuning import BlockSizes

    batch, pages, group, num_kv = 8, 8192 // PAGE_SIZE, 4, 2
    sizes = BlockSizes.for_heads(num_kv)
    queries = sizes.block_queries(tokens, group)
    tile = sizes.tile_queries(queries, group)
    found = []
    for prefix in (0, tokens):
        lens = np.minimum(np.arange(batch + 1), 1) * tokens  # the first row has all queries
        rows = AttentionMetadata(
            page_table=jnp.ones((batch, pages), jnp.int32),
            prefix_lens=jnp.asarray([prefix, *[0] * (batch - 1)], jnp.int32),
            cu_q_lens=jnp.asarray(lens, jnp.int32),
            q_positions=jnp.arange(tokens, dtype=jnp.int32) + prefix,
        )
        plan = plan_packed(
            rows,
            -(-tokens // queries) * queries,
            block_queries=tile,
            page_size=PAGE_SIZE,
            writes=True,
            window=None,
        )
        operands: dict[int, Words] = {
            0: lens.tolist(),
            1: [prefix, *[0] * (batch - 1)],
            2: 1,
            3: np.asarray(plan.spans).reshape(-1).tolist(),
            4: np.asarray(join_spans(plan.spans, queries // tile)).reshape(-1).tolist(),
        }
        pairs = tokens * (tokens + 1) // 2 + tokens * prefix
        found.append(
            Scenario(
                name=f"{tokens:,} tokens after {prefix:,}",
                operands=operands,
                floor_bytes=float((tokens + prefix) * num_kv * 2 * 128 * 2),
                floor_flops=4.0 * pairs * num_kv * group * 128,
            )
        )
    return found


def experts(tokens: int, *, num_experts: int, top_k: int, weight_bytes: float) -> list[Scenario]:
    """Return pairs of `tokens` that choose uniformly. weight_bytes: of one expert's product."""
    import numpy as np

    from jspec.pallas_kernels.experts.reference import blocks_of
    from jspec.pallas_kernels.experts.tpu import choose_tile_m

    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(num_experts)[:top_k] for _ in range(tokens)])
    tile_m = choose_tile_m(ids.size, num_experts)
    assert tile_m is not None
    blocks = blocks_of(ids.astype(np.int32), num_experts=num_experts, tile_m=tile_m)
    used = int(blocks.num_used)
    touched = len(np.unique(ids))
    operands: dict[int, Words] = {0: np.asarray(blocks.expert).tolist(), 1: [used]}
    name = f"{tokens} tokens, {touched} of {num_experts} experts"
    return [Scenario(name=name, operands=operands, floor_bytes=touched * weight_bytes)]


def none() -> list[Scenario]:
    return []


def rows_of(name: str, queries: int, *, kv_heads: int) -> Case:
    return Case(
        name=name,
        kernel=f"paged_attention_rows_{queries}",
        scenarios=attention(queries, kv_heads=kv_heads),
    )


CASES = (
    rows_of("rows, 8b tp4 R 1 page 64", 1, kv_heads=2),
    rows_of("rows, 8b tp4 R 4 page 64", 4, kv_heads=2),
    rows_of("rows, 8b tp4 tree of 16", 16, kv_heads=2),
    rows_of("rows, 8b tp8 R 1", 1, kv_heads=1),
    rows_of("rows, 8b tp8 R 4", 4, kv_heads=1),
    rows_of("rows, 8b tp8 R 16", 16, kv_heads=1),
    Case(
        name="prefill, 8b tp4 T 1024 page 64",
        kernel="paged_prefill",
        scenarios=lambda: prefill(1024),
    ),
    Case(
        name="experts, qwen3-30b-a3b, 64 tokens",
        kernel="experts_product",
        scenarios=lambda: experts(64, num_experts=128, top_k=8, weight_bytes=2048 * 2 * 768 * 2.0),
    ),
    # Not simulated: the kernel finds its 32 pools in a table that the listing does not explain.
    Case(name="compaction, 8b tp4, pages of 64, 8 levels", kernel="compact_paths", scenarios=none),
    Case(name="gathering, 8b, tree of 16", kernel="gather_emitted", scenarios=none),
)


def compile_case(name: str, topology: str, directory: Path) -> None:
    """Compile a case in a process of its own, with the listings in `directory`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.tpu_compile", topology, name],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "LIBTPU_INIT_ARGS": FLAGS.format(directory)},
    )
    if done.returncode:
        raise RuntimeError(f"{name} on {topology}: {done.stderr[-2000:]}")


def listing(directory: Path, kernel: str) -> Path:
    """Return the first listing of a kernel in `directory`. Raises FileNotFoundError."""
    found = sorted(x for x in directory.glob(f"*{LISTING}") if f"-{kernel}" in x.name)
    if not found:
        names = sorted(x.name for x in directory.glob(f"*{LISTING}"))
        raise FileNotFoundError(f"no listing of {kernel}; expected one of {names}")
    return found[0]


def report(case: Case, topology: str) -> dict[str, Any]:
    """Compile one case and return its loops and the simulated times."""
    with tempfile.TemporaryDirectory() as directory:
        compile_case(case.name, topology, Path(directory))
        bundles = read(listing(Path(directory), case.kernel))
    loop, chip, program = inner_loop(bundles), chip_of(topology), Program(bundles)
    runs = {}
    for scenario in case.scenarios():
        run = Core(program, chip, scenario.operands).run()
        runs[scenario.name] = {
            "us": round(run.us(chip), 2),
            "floor_us": round(
                max(
                    scenario.floor_bytes / chip.bytes_per_us,
                    scenario.floor_flops / chip.flops_per_us,
                ),
                2,
            ),
            "bundles": run.bundles,
            "waiting_us": round(chip.us(run.waits), 2),
            "hbm_bytes": run.hbm_bytes,
            "copies": sum(run.copies.values()),
            "faults": dict(run.faults),
        }
    return {
        "kernel": case.kernel,
        "bundles": len(bundles),
        "inner_loop": None if loop is None else {"bundles": loop.own, "products": loop.products},
        "simulated": runs,
    }
