"""Cycles of one tile of the TPU's prefill attention, by libtpu's evaluator of bundles.

    python -m benchmarks.tpu_cycles.prefill_tile [--topology v6e:2x2]

As attention_block.py, of the kernel's own `absorb_tile`: all KV heads of a tile of queries and one
step of keys that all of them see. The products' cycles are those of matrix units of 256 x 256, of
which a head of 128 leaves half idle; on v5e, of 128 x 128.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from benchmarks.tpu_cycles.attention_block import compile_for, evaluate
from benchmarks.tpu_cycles.chips import chip_of
from benchmarks.tpu_programs import V6E

# (query heads, KV heads) of a shard: Llama-3.1-8B over four chips, 70B over eight, 8B over one.
SHAPES = ((8, 2), (8, 1), (32, 8))
WIDTH, FEW, MANY = 128, 16, 32


def shape_of(heads: int, kv_heads: int) -> Any:
    from jspec.pallas_kernels.prefill.tpu import Shape
    from jspec.pallas_kernels.prefill.tuning import BlockSizes

    sizes, group = BlockSizes.for_heads(kv_heads), heads // kv_heads
    queries = sizes.block_queries(2048, group)
    return Shape(
        batch=8,
        pages_per_row=128,
        page_size=64,
        num_kv=kv_heads,
        group=group,
        queries=queries,
        tile=sizes.tile_queries(queries, group),
        keys=sizes.block_keys(64),
        num_blocks=1,
        scale=0.088,
        writes=True,
        has_sinks=False,
        interpreted=False,
    )


def compile_tiles(topology: str, heads: int, kv_heads: int, tiles: int) -> None:
    """Compile a kernel that absorbs `tiles` tiles."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from jspec.pallas_kernels.prefill.tpu import LOWEST, VMEM_LIMIT, absorb_tile

    shape = shape_of(heads, kv_heads)

    def kernel(q: Any, pairs: Any, out: Any, top: Any, total: Any, mixed: Any) -> None:
        refs: Any = SimpleNamespace(q=q, pairs=pairs, top=top, total=total, mixed=mixed)
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _() -> None:
            top[...] = jnp.full_like(top, LOWEST)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        absorb_tile(shape, refs, jnp.int32(0), shape.keys, masked=False)

        @pl.when(step == tiles - 1)
        def _() -> None:
            out[...] = mixed[...] + total[...]

    partial = (kv_heads, shape.tile_rows, WIDTH)
    sizes = (partial, (2, kv_heads, shape.keys, WIDTH))

    def call(q: Any, pairs: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(tiles,),
            in_specs=[
                pl.BlockSpec(sizes[0], lambda _: (0, 0, 0)),
                pl.BlockSpec(sizes[1], lambda _: (0, 0, 0, 0)),
            ],
            out_specs=pl.BlockSpec(partial, lambda _: (0, 0, 0)),
            out_shape=jax.ShapeDtypeStruct(partial, jnp.float32),
            scratch_shapes=[pltpu.VMEM(partial, jnp.float32)] * 3,
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT),
            name="prefill_tile",
        )(q, pairs)

    compile_for(topology, call, sizes)


def cycles(topology: str, heads: int, kv_heads: int, tiles: int) -> int:
    words = [topology, str(heads), str(kv_heads), str(tiles)]
    return evaluate("benchmarks.tpu_cycles.prefill_tile", words, "prefill_tile")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topology", default=V6E)
    parser.add_argument("--compile", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        topology, *numbers = options.compile
        compile_tiles(topology, *map(int, numbers))
        return
    chip = chip_of(options.topology)
    for heads, kv_heads in SHAPES:
        shape = shape_of(heads, kv_heads)
        many, few = (cycles(options.topology, heads, kv_heads, n) for n in (MANY, FEW))
        scores = kv_heads * shape.tile_rows * shape.keys
        idle = 1 if chip.name == "v5e" else 2
        products = 4 * scores * WIDTH / chip.flops_per_us * chip.ghz * 1e3 * idle
        print(
            f"{options.topology}: {heads}/{kv_heads} heads, {shape.tile_rows} rows, "
            f"{shape.keys} keys: {(many - few) / (MANY - FEW):.0f} cycles; products "
            f"{products:.0f}, {scores // 1024} vectors of scores",
            flush=True,
        )


if __name__ == "__main__":
    main()
