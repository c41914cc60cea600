"""Compile the choice of tokens, filters included, for an absent H200.

Run by test_threshold_gpu_target.py in a separate process, see gpu_kernel_compile.py. Prints the
arrays of size [B, N, V] that each operation inside the loop over passes reads and writes.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jspec.device.state import SamplingBatch, empty_sampling
from jspec.layers.linear import Shard
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.choose import choose
from tests.pallas_kernels.gpu_kernel_compile import H200

B, N = 64, 4


def compiled_choice(sharding: jax.sharding.Sharding, num_ids: int) -> str:
    """Return the optimised program."""

    def run(logits: jax.Array, rows: SamplingBatch, positions: jax.Array) -> jax.Array:
        ids = jnp.arange(num_ids, dtype=jnp.int32)
        return choose(
            logits,
            rows,
            positions=positions,
            token_ids=ids,
            filtered=True,
            shard=Shard(),
            ops=Ops(),
        )

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shapes = (
        jax.ShapeDtypeStruct((B, N, num_ids), jnp.float32),
        jax.eval_shape(partial(empty_sampling, B, vocab_size=num_ids)),
        jax.ShapeDtypeStruct((B, N), jnp.int32),
    )
    lowered = jax.jit(run).lower(*jax.tree.map(placed, shapes))
    return lowered.compile({"xla_gpu_autotune_level": "0"}).as_text() or ""


def large_arrays(text: str, num_ids: int) -> list[tuple[list[str], list[str]]]:
    """Return (read, written) large arrays of every operation of the loop's body that has any."""
    text = re.sub(r"/\*.*?\*/", "", text)
    loop = re.search(r"body=(%[\w.\-]+)", text)
    if loop is None:
        raise SystemExit("the compiled program has no loop")
    body = text.split(f"\n{loop[1]} ")[1].split("\n}")[0]
    lines = re.findall(r"(%[\w.\-]+) = (\(?[^=]*?) ([\w\-]+)\(([^)]*)\)", body)
    written = {name: re.findall(rf"\w+\[{B},{N},{num_ids}\]", type_) for name, type_, *_ in lines}
    moved = []
    for name, _, operation, operands in lines:
        if operation in ("parameter", "get-tuple-element", "tuple", "bitcast"):
            continue
        read = [array for x in re.findall(r"%[\w.\-]+", operands) for array in written.get(x, [])]
        if read or written[name]:
            moved.append((read, written[name]))
    return moved


def main() -> None:
    """Compile Llama-3's vocabulary, half of it (one of two shards), and Qwen's."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    for num_ids in (128_256, 64_128, 151_936):
        text = compiled_choice(jax.sharding.SingleDeviceSharding(device), num_ids)
        if 'known_trip_count":{"n":"11"}' not in text:
            raise SystemExit("the number of passes is not static: the host would wait for it")
        print(num_ids, large_arrays(text, num_ids))


if __name__ == "__main__":
    main()
