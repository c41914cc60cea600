"""Compile the steps of delta nets and of wide attention for an absent H200, in a separate process.

Run by test_delta_rule_gpu.py. Needs the jax-cuda13 plugin and ptxas. Prints one line per kernel:
its registers and the bytes that it spills, of which there must be none; and no pool is copied.
The kernel of latents may spill what a row's last block needs: its sums take most registers.
"""

from __future__ import annotations

from tests.pallas_kernels.ptxas_log import logged

from collections.abc import Callable  # isort: skip
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.device.state import empty_caches
from jspec.pallas_kernels.attention import gpu_wide
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.delta_rule import gpu as delta_rule_gpu
from jspec.pallas_kernels.delta_rule import reference
from jspec.pallas_kernels.latent_attention import gpu as latent_attention_gpu
from jspec.pallas_kernels.shapes import GLM_4_7_FLASH, QWEN3_5_9B
from jspec.spec.cache_entry import CacheLayout
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.layers.attention import LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from tests.engine.pool_copies import pool_copies
from tests.pallas_kernels.gpu_kernel_compile import H200

# Rows, nodes, most accepted tokens, whether nodes are a tree.
CASES = ((1, 1, 1, False), (64, 4, 4, False), (64, 16, 4, True))
NUM_PAGES = 1031


def ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def rows_of(batch: int, nodes: int, *, is_tree: bool) -> AttentionMetadata:
    tokens = batch * nodes
    return AttentionMetadata(
        page_table=ints(batch, 132),
        prefix_lens=ints(batch),
        cu_q_lens=ints(batch + 1),
        q_positions=ints(tokens),
        tail_mask=jax.ShapeDtypeStruct((tokens, 1), jnp.uint32) if is_tree else None,
        tail_positions=ints(batch, nodes) if is_tree else None,
        slots=ints(batch),
    )


def delta_arguments(batch: int, nodes: int, path: int, *, is_tree: bool) -> tuple[Any, ...]:
    """Return abstract arguments of `run_rows` for 64 slots."""
    spec = QWEN3_5_9B.mixer
    assert isinstance(spec, DeltaNetSpec)
    layout = CacheLayout(page_size=64, dtype="bfloat16", num_nodes=nodes, num_path=path)
    group = CacheGroup("one", 1, spec.cache_entry)
    (cache,) = jax.eval_shape(lambda: empty_caches((group,), layout=layout, num_units=lambda _: 65))
    steps = jax.ShapeDtypeStruct((batch * nodes, spec.num_heads), jnp.float32)
    inputs = jax.ShapeDtypeStruct((batch * nodes, spec.conv_dim), jnp.bfloat16)
    conv = jax.ShapeDtypeStruct((spec.conv_size, spec.conv_dim), jnp.bfloat16)
    return cache, inputs, steps, steps, conv, rows_of(batch, nodes, is_tree=is_tree)


def compiled(run: Callable[..., Any], given: tuple[Any, ...], *, pools: list[Any]) -> Any:
    """Compile run(*given), whose first argument is donated. Return ptxas' report by kernel."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    mesh, whole = Mesh(np.array([device]), ("tensor",)), PartitionSpec()
    placed = NamedSharding(mesh, whole)
    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False),
        donate_argnums=0,
        in_shardings=placed,
        out_shardings=placed,
    ).lower(*given)
    options = {"xla_disable_hlo_passes": "dot-strength-reduction"}  # as steps are compiled
    made, found = logged(lambda: program.compile(options))
    text = made.as_text() or ""
    if copies := [x for pool in pools for x in pool_copies(text, pool.shape)]:
        raise SystemExit(copies[0])
    return found


def report(
    found: dict[str, tuple[int, int]], name: str, *what: object, most_spilled: int = 0
) -> None:
    of_name = {key: value for key, value in found.items() if key.startswith(name)}
    if not of_name:
        raise SystemExit(f"the kernels are {list(found)}; expected {name}")
    for kernel, (registers, spilled) in of_name.items():
        print("compiled", *what, kernel, registers, "registers", spilled, "spilled", flush=True)
        if spilled > most_spilled:
            raise SystemExit(f"{kernel} spills {spilled} bytes")


def delta_rule(batch: int, nodes: int, path: int, *, is_tree: bool) -> None:
    cache, *others = delta_arguments(batch, nodes, path, is_tree=is_tree)

    def run(cache: Any, inputs: Any, decay: Any, beta: Any, conv: Any, rows: Any) -> Any:
        return delta_rule_gpu.run_rows(inputs, decay, beta, conv, cache, rows, nodes=nodes)

    found = compiled(run, (cache, *others), pools=list(cache.values()))
    # A state in the registers of one warp: 132 us a layer for 64 rows, 156 in two without spills.
    report(found, "delta", "delta rule", batch, nodes, most_spilled=64)


def chunks(tokens: int, batch: int) -> None:
    """Compile packed chunks of prompts by XLA, and by kernels, which may spill a few registers."""
    cache, *others = delta_arguments(batch, tokens // batch, 1, is_tree=False)

    def run(cache: Any, *given: Any, bundle: str) -> Any:
        *inputs, rows = given
        return OPS[bundle].delta_rule(*inputs, cache, rows, queries_per_row=None)

    pools = [cache["state"], cache["conv"]]
    compiled(partial(run, bundle="xla"), (cache, *others), pools=pools)
    found = compiled(partial(run, bundle="gpu"), (cache, *others), pools=pools)
    report(found, "delta", "chunks", tokens, batch, most_spilled=64)


def attention(batch: int, nodes: int, *, is_tree: bool, is_latent: bool) -> None:
    """Compile the reads of a pool of latents or of heads of 256."""
    rows = rows_of(batch, nodes, is_tree=is_tree)
    if is_latent:
        spec = GLM_4_7_FLASH.mixer
        assert isinstance(spec, LatentAttentionSpec)
        width, num_heads, rank = spec.kv_rank + spec.rope_dim, spec.num_heads, spec.kv_rank
        pool: tuple[int, ...] = (NUM_PAGES, 64, width)
    else:
        num_heads, num_kv, width = QWEN3_5_9B.heads
        rank = None
        pool = (NUM_PAGES, 64, 2 * num_kv, width)
    q = jax.ShapeDtypeStruct((batch * nodes, num_heads, width), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct(pool, jnp.bfloat16)
    run = partial(gpu_wide.attend_rows, queries_per_row=nodes, scale=0.1, value_dim=rank)
    report(compiled(run, (q, pages, rows), pools=[pages]), "attend_wide", *pool[2:], batch, nodes)


def latents(batch: int, nodes: int, *, is_tree: bool) -> None:
    """Compile the Mosaic kernel, which reads what `attention` reads of a pool of latents."""
    spec = GLM_4_7_FLASH.mixer
    assert isinstance(spec, LatentAttentionSpec)
    width = spec.kv_rank + spec.rope_dim
    q = jax.ShapeDtypeStruct((batch * nodes, spec.num_heads, width), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((NUM_PAGES, 64, width), jnp.bfloat16)
    rows = rows_of(batch, nodes, is_tree=is_tree)
    how: Any = {"queries_per_row": nodes, "rank": spec.kv_rank, "scale": 0.1}
    found = compiled(
        partial(latent_attention_gpu.attend_rows, **how), (q, pages, rows), pools=[pages]
    )
    report(found, "latent_attention", width, batch, nodes, most_spilled=400)


def main() -> None:
    for batch, nodes, path, is_tree in CASES:
        delta_rule(batch, nodes, path, is_tree=is_tree)
        latents(batch, nodes, is_tree=is_tree)
        attention(batch, nodes, is_tree=is_tree, is_latent=False)
    chunks(2048, 4)
    attention(1, 1, is_tree=False, is_latent=True)  # steps of more tokens are the other kernel's
    cache, *others = delta_arguments(1, 1, 1, is_tree=False)

    def plain(cache: Any, inputs: Any, decay: Any, beta: Any, conv: Any, rows: Any) -> Any:
        return reference.run_rows(inputs, decay, beta, conv, cache, rows, nodes=1)

    compiled(plain, (cache, *others), pools=[])
    print("compiled without kernels")


if __name__ == "__main__":
    main()
