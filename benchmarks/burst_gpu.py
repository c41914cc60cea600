"""How fast an NVIDIA GPU reads what one token's experts weigh, in one launch.

    python -m benchmarks.burst_gpu --out benchmarks/results/burst_gpu.json

A program reads EXPERTS stretches of memory, drawn anew for each call, by TMA into rings of shared
memory, and does nothing with them: 128 blocks, `ring` KiB on their way in each, in tiles of
rows x `piece` bytes. So its time is a floor for any kernel that streams experts, however it is
launched. Two lengths of the stretches give the time of a launch without bytes and the rate of more.
`launches`: microseconds of one of many small launches that wait for each other, in a CUDA graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from benchmarks.environment import write_result
from benchmarks.gpu_timing import seconds_per_call
from jspec.pallas_kernels.hopper import SWIZZLE, each

EXPERTS, OF = 8, 96  # stretches of a call, of so many
BLOCKS, EACH = 128, 16  # programs, and those of a stretch
WIDTH, ROWS = 2048, 2304  # a stretch: bf16, 9.4 MB, the weights of an expert of Qwen3-30B-A3B
CALLS, ROUNDS, LAUNCHES = 24, 5, 200
# rows of a tile, and how many times 64 columns.
TILES = {"128": (64, 1), "256": (64, 2), "512": (64, 4), "4096": (8, 32)}


def _read(tile: tuple[int, int], stages: int, rows: int, *refs: Any, **scratch: Any) -> None:
    """This block's sixteenth of a stretch, tile after tile."""
    (ids, memory, _, out), ring, full = refs, scratch["ring"], scratch["full"]
    block = lax.axis_index("block")
    depth, groups = tile
    start, part = ids[block // EACH] * ROWS, block % EACH
    across = WIDTH // 64 // groups  # tiles side by side
    down = rows // depth
    count = across * down // EACH

    def load(i: Any) -> None:
        index = part * count + i  # a column of tiles after the other
        at = pl.ds(start + lax.rem(index, down) * depth, depth)
        source = memory.at[at, pl.ds(lax.div(index, down) * groups, groups)]
        stage = lax.rem(i, stages)
        plgpu.copy_gmem_to_smem(source, ring.at[stage], full.at[stage])

    def step(i: Any) -> None:
        plgpu.barrier_wait(full.at[lax.rem(i, stages)])

        @pl.when(i + stages < count)
        def _() -> None:
            load(i + stages)

    each(0, min(stages, count), load)
    each(0, count, step)
    out[block] = start


def burst(
    ids: jax.Array, memory: jax.Array, before: jax.Array, *, piece: str, ring: int, rows: int
) -> jax.Array:
    """Reads `rows` rows of each stretch, after `before`. i32[BLOCKS], where each began."""
    tile = TILES[piece]
    stages = ring * 1024 // (tile[0] * tile[1] * 128)

    def read_burst_gpu(*refs: Any, **scratch: Any) -> None:  # the name that profiles show
        _read(tile, stages, rows, *refs, **scratch)

    out: jax.Array = plgpu.kernel(
        read_burst_gpu,
        out_type=jax.ShapeDtypeStruct((BLOCKS,), jnp.int32),
        scratch_types={
            "ring": plgpu.SMEM(
                (stages, tile[0], tile[1], 64),
                jnp.bfloat16,
                transforms=(plgpu.TilingTransform((8, 1, 64)), plgpu.SwizzleTransform(SWIZZLE)),
            ),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        },
        grid=(BLOCKS,),
        grid_names=("block",),
    )(ids, memory, before)
    return out


def bursts(calls: jax.Array, memory: jax.Array, **how: Any) -> jax.Array:
    """CALLS of them, each after the one before."""
    before = jnp.zeros((BLOCKS,), jnp.int32)
    for ids in calls:
        before = burst(ids, memory, before, **how)
    return before


def small_launches(x: jax.Array, *, kinds: str) -> jax.Array:
    """LAUNCHES kernels that add one to 128 numbers, t: Triton's, m: Mosaic GPU's, in turns."""

    def add(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + 1.0

    triton: Callable[..., jax.Array] = pl.pallas_call(
        add,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )
    mosaic: Callable[..., jax.Array] = plgpu.kernel(
        add, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(1,), grid_names=("block",)
    )
    for i in range(LAUNCHES):
        x = {"t": triton, "m": mosaic}[kinds[i % len(kinds)]](x)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    drawn = [rng.choice(OF, EXPERTS, replace=False) for _ in range(CALLS)]
    calls = jnp.asarray(np.stack(drawn), jnp.int32)
    memory = jax.random.normal(jax.random.key(0), (OF * ROWS, WIDTH // 64, 64), jnp.bfloat16)
    names = [(p, r, n) for p in TILES for r in (64, 128, 192) for n in (ROWS // 3, ROWS)]
    numbers = jnp.zeros(128, jnp.float32)
    jobs: dict[Any, tuple[Any, tuple[Any, ...]]] = {
        name: (
            jax.jit(partial(bursts, piece=name[0], ring=name[1], rows=name[2])),
            (calls, memory),
        )
        for name in names
    }
    jobs |= {
        kinds: (jax.jit(partial(small_launches, kinds=kinds)), (numbers,))
        for kinds in ("t", "m", "tm")
    }
    lowered = {key: run.lower(*args) for key, (run, args) in jobs.items()}
    with ThreadPoolExecutor(12) as pool:
        programs = dict(
            zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True)
        )
    found: dict[Any, list[float]] = {key: [] for key in programs}
    for _ in range(ROUNDS):
        for key, program in programs.items():
            count = CALLS if isinstance(key, tuple) else LAUNCHES
            seconds = seconds_per_call(program, jobs[key][1], count, samples=3)
            found[key].append(round(1e6 * seconds, 2))
    reads = []
    for piece in TILES:
        for ring in (64, 128, 192):
            short, long = (sorted(found[piece, ring, n])[2] for n in (ROWS // 3, ROWS))
            more = EXPERTS * (ROWS - ROWS // 3) * WIDTH * 2
            row = {"piece_bytes": int(piece), "ring_kib": ring, "us_25_mb": short, "us_75_mb": long}
            row |= {"tb_s_of_more": round(more / (long - short) / 1e6, 2)}
            reads.append(row | {"all_75": found[piece, ring, ROWS]})
            print(reads[-1], flush=True)
    launches = {kinds: found[kinds] for kinds in ("t", "m", "tm")}
    print(launches, flush=True)
    if options.out:
        write_result(options.out, {"reads": reads, "launches": launches})


if __name__ == "__main__":
    main()
