"""Compile the experts' kernels for an absent H200, in a separate process.

Run by test_experts_gpu.py. Needs the jax-cuda13 plugin, which accepts a description of the chip,
and ptxas. Prints one line per shape.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.device.weights import weight_of
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.experts.gpu import run_experts
from jspec.pallas_kernels.experts.reference import PRODUCTS
from jspec.pallas_kernels.experts.tuning import ExpertsTuning, choose_experts
from jspec.pallas_kernels.shapes import GPT_OSS_20B, QWEN3_30B_A3B
from jspec.spec.layers.feed_forward import Gate, MoESpec
from jspec.spec.weight_format import FP8, MXFP4, ArraySpec
from tests.pallas_kernels.gpu_kernel_compile import H200

SHAPES = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-20b tp2": GPT_OSS_20B.shard(2),
}
TOKENS = (1, 64, 256, 8192)
MIXTURE_KERNELS = {1: 4, 4: 5, 16: 5, 256: 8}  # with the norm after it, by tokens
PACKED_KERNELS = {1: 3, 16: 5, 64: 6}  # beside two of Mosaic
FP8_CASES = ((1, True), (16, True), (256, True), (4, False), (256, False))  # tokens, has_blocks


def compile_moe(
    name: str, tokens: int, array: Any, mesh: Mesh, *, format: FP8 | MXFP4 | None = None
) -> None:
    """Compile an MoE with its norms, as a layer runs it. format: of the experts."""
    spec, size = SHAPES[name].ffn, SHAPES[name].hidden_size
    assert isinstance(spec, MoESpec)
    params = {
        part: {key: array(shape, jnp.bfloat16) for key, shape in entry.items()}
        for part, entry in SHAPES[name].moe_params.items()
    }
    if format is not None:
        params["experts"] |= {
            key: packed(format, params["experts"][key].shape, array) for key in PRODUCTS
        }

    def layer(x: jax.Array, scale: jax.Array, params: Any) -> Any:
        fused = OPS["gpu"].moe_of_sum(x, x, scale, params, eps=1e-6, spec=spec)
        if fused is None:
            raise SystemExit(f"{name}, {tokens} tokens: the kernels are not chosen")
        return OPS["gpu"].mixed_norm(fused[0], fused[2], scale, eps=1e-6)

    whole = PartitionSpec()
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    args = (array((tokens, size), jnp.bfloat16), array((size,), jnp.bfloat16), params)
    text = jax.jit(mapped).lower(*args).compile().as_text() or ""
    kernels = text.count('custom_call_target="__gpu$xla.gpu.triton"')
    of_mosaic = text.count("experts_mxfp4_gpu")
    is_mxfp4 = isinstance(format, MXFP4)
    if kernels != (PACKED_KERNELS if is_mxfp4 else MIXTURE_KERNELS)[tokens]:
        raise SystemExit(f"{name}, {tokens} tokens: {kernels} Triton kernels")
    if (of_mosaic > 0) != is_mxfp4:
        raise SystemExit(f"{name}, {tokens} tokens: {of_mosaic} mentions of the kernel for mxfp4")
    if re.search(r"f8e4m3fn\S* (copy|transpose|fusion)\(", text):
        raise SystemExit(f"{name}, {tokens} tokens: the codes are copied")
    print("compiled", name, tokens, "mixture", format or "")


def packed(format: FP8 | MXFP4, shape: tuple[int, ...], array: Any) -> Any:
    """Return a weight whose codes are column-major, as on a device."""

    def make(own: ArraySpec) -> Any:
        like = array(own.shape, own.dtype)
        if own.dtype != "float8_e4m3fn":
            return like
        placed = Format(Layout(major_to_minor=(0, 2, 1)), like.sharding)
        return jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=placed)

    return weight_of(format, shape, make)


def summed(*arguments: Any, gate: Gate, tuning: ExpertsTuning) -> jax.Array:
    return run_experts(*arguments, gate=gate, tuning=tuning).sum()


def main() -> None:
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    mesh, whole = Mesh(np.array([device]), ("tensor",)), PartitionSpec()
    array = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, whole))
    for name in ("qwen3-30b-a3b", "gpt-oss-20b"):  # a shard's sum comes before the residual
        for tokens in MIXTURE_KERNELS:
            compile_moe(name, tokens, array, mesh)
    for tokens, has_blocks in FP8_CASES:
        compile_moe("qwen3-30b-a3b", tokens, array, mesh, format=FP8(has_blocks=has_blocks))
    for tokens in PACKED_KERNELS:
        compile_moe("gpt-oss-20b", tokens, array, mesh, format=MXFP4())
    for name, shape in SHAPES.items():
        spec, (size, inner) = shape.ffn, shape.widths
        assert isinstance(spec, MoESpec)
        params = {
            key: array(of_weight, jnp.bfloat16)
            for key, of_weight in shape.moe_params["experts"].items()
            if key != "down_bias"
        }
        for tokens in TOKENS:
            sizes = {"num_experts": spec.num_experts, "size": size, "inner": inner}
            tuning = choose_experts(tokens * spec.top_k, **sizes)
            if tuning is None:
                raise SystemExit(f"{name}, {tokens} tokens: the kernels are not chosen")
            run = jax.jit(  # Pallas asks the mesh for which chip it lowers
                jax.shard_map(
                    partial(summed, gate=spec.gate, tuning=tuning),
                    mesh=mesh,
                    in_specs=whole,
                    out_specs=whole,
                    check_vma=False,
                )
            )
            args = (
                array((tokens, size), jnp.bfloat16),
                array((tokens, spec.top_k), jnp.int32),
                array((tokens, spec.top_k), jnp.float32),
                params,
            )
            text = run.lower(*args).compile().as_text() or ""
            kernels = text.count('custom_call_target="__gpu$xla.gpu.triton"')
            if kernels != 4:
                raise SystemExit(f"{name}, {tokens} tokens: {kernels} Triton kernels")
            print("compiled", name, tokens)


if __name__ == "__main__":
    main()
