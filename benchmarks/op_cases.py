"""The cases of benchmarks.ops: each op's arguments, and its least bytes and operations.

An op is a function of (model, sizes) that returns a Case; OPS names it with its default sizes.
Arguments are random, and no page of a pool is read by two rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from benchmarks.floors import experts_touched, weight_bytes
from jspec.device.weights import weight_of
from jspec.layers.linear import Shard
from jspec.layers.moe import moe_of_sum
from jspec.layers.norm import Residual, norm_of_sum
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.attention.reference import new_slots
from jspec.pallas_kernels.kv_write import reference as kv_write
from jspec.pallas_kernels.kv_write.api import HeadNorms, KVScales
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.ops_gpu import GpuOps
from jspec.pallas_kernels.shapes import MODELS as REAL_MODELS
from jspec.pallas_kernels.shapes import ModelShape
from jspec.spec.cache_entry import FP8 as FP8_CACHE
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import DenseSpec, Gate, MoESpec
from jspec.spec.weight_format import FP8, Dense
from jspec.spec.weight_format import Op as Product
from jspec.speculative.tree import LOWEST

DTYPE = jnp.bfloat16
KV_DTYPES = {"bfloat16": jnp.dtype(DTYPE), "fp8_e4m3": jnp.dtype(FP8_CACHE)}
BYTES = 2  # of a number
PAGE = 64
EPS = 1e-6
TINY = ModelShape(  # for a run without an accelerator
    hidden_size=64,
    vocab_size=320,
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True),
    ffn=DenseSpec(inner=128),
)
TINY_MOE = replace(
    TINY, ffn=MoESpec(num_experts=4, top_k=2, inner=64, gate=Gate.CLAMPED, bias=True)
)
TINY_DELTA = replace(
    TINY, mixer=DeltaNetSpec(num_heads=4, num_key_heads=2, key_dim=16, value_dim=16)
)
TINY_MODELS = {"tiny": TINY, "tiny-moe": TINY_MOE, "tiny-delta": TINY_DELTA}
MODELS: Mapping[str, ModelShape] = {**REAL_MODELS, **TINY_MODELS}

Arrays = Any  # a pytree of them


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size.

    make: (arguments, the arrays that the op updates in place, or ()) from a seed.
    run: (ops, arguments, state) -> (result, state).
    num_bytes, flops: least per call.
    decode_tokens: of the step that it is part of; None: a prefill.
    worst: largest difference to XLA, as a share of the largest value; ids must be equal.
    left_out: share of the tokens, those that differ most, whose difference does not count.
    column_major: the last argument, a weight [in, out], is stored [out, in].
    """

    make: Callable[[int], tuple[Arrays, Arrays]]
    run: Callable[[Ops, Arrays, Arrays], tuple[Arrays, Arrays]]
    num_bytes: float
    flops: float = 0.0
    decode_tokens: int | None = None
    worst: float = 0.02
    left_out: float = 0.0
    column_major: bool = False


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: Any = DTYPE) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype) * jnp.asarray(scale, dtype)


def pure(run: Callable[[Ops, Arrays], Arrays]) -> Callable[[Ops, Arrays, Arrays], Any]:
    """Make a case of an op that updates no array."""
    return lambda ops, arguments, state: (run(ops, arguments), state)


# Attention.


def rows_of(batch: int, queries: int, prefix: int, *, packed: bool, tree: bool) -> Any:
    """Return metadata of rows of one length, and the number of pages of their pool."""
    pages = -(-(prefix + queries) // PAGE)
    order = np.random.default_rng(0).permutation(batch * pages) + 1
    positions = np.tile(prefix + np.arange(queries, dtype=np.int32), (batch, 1))
    fields: dict[str, Any] = {}
    if tree:
        draw = np.random.default_rng(1).random((batch, queries, queries))
        sees = np.tril(draw < 0.5) | np.eye(queries, dtype=bool)
        words = (sees * (1 << np.arange(queries))).sum(axis=-1)
        fields["tail_mask"] = jnp.asarray(words.reshape(-1, 1), jnp.uint32)
        fields["tail_positions"] = jnp.asarray(positions)
    rows = AttentionMetadata(
        page_table=jnp.asarray(order.reshape(batch, pages), jnp.int32),
        prefix_lens=jnp.full(batch, prefix, jnp.int32),
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * queries,
        q_positions=jnp.asarray(positions.reshape(-1)),
        **fields,
    )
    return rows, batch * pages + 1, None if packed else queries


def pool_of(seed: int, *shape: int, kv: str) -> jax.Array:
    """Return random K and V; FP8 values are drawn relative to their scale, with room for
    outliers."""
    pool = normal(seed, *shape, scale=1.0 if kv == "bfloat16" else 32.0)
    return pool.astype(KV_DTYPES[kv])


def scales_of(kv: str) -> KVScales | None:
    each = jnp.full(1, 1 / 32, jnp.float32)
    return None if kv == "bfloat16" else KVScales(k=each, v=each)


def attend(
    shape: ModelShape,
    *,
    batch: int,
    queries: int,
    context: int,
    packed: bool = False,
    kv: str = "bfloat16",
) -> Case:
    """Attention of `queries` tokens per row, the last of `context`; as a tree from 16 on.

    kv: of the cache, by the names of --kv-cache-dtype.
    """
    H, G, D = shape.heads
    tree = not packed and queries >= 16
    rows, num_pages, per_row = rows_of(batch, queries, context - queries, packed=packed, tree=tree)
    call = AttentionCall(queries_per_row=per_row, scale=shape.attention.softmax_scale)
    sinks = jnp.ones(H) if shape.attention.sinks else None

    def make(seed: int) -> tuple[Arrays, Arrays]:
        q = normal(seed, batch * queries, H, D)
        pool = pool_of(seed + 1, num_pages, PAGE, 2 * G, D, kv=kv)
        return (q, pool, rows, scales_of(kv)), ()

    def run(ops: Ops, arguments: Arrays) -> jax.Array:
        q, pool, rows, scales = arguments
        return ops.attend(q, None, None, pool, rows, call, sinks, scales)[0]

    seen = batch * (queries * (context - queries) + queries * (queries + 1) / 2)
    return Case(
        make=make,
        run=pure(run),
        num_bytes=batch
        * (KV_DTYPES[kv].itemsize * context * 2 * G * D + BYTES * 2 * queries * H * D),
        flops=4 * seen * H * D,
        decode_tokens=None if packed else batch * queries,
    )


def write_kv(shape: ModelShape, *, batch: int, queries: int, kv: str = "bfloat16") -> Case:
    """Norms and RoPE of heads, and the write of K and V: a GPU's kernel, or the definition."""
    H, G, D = shape.heads
    rows, num_pages, _ = rows_of(batch, queries, PAGE, packed=False, tree=False)
    page, offset = new_slots(rows, batch * queries, page_size=PAGE, queries_per_row=queries)
    norms = None
    if shape.attention.qk_norm:
        norms = HeadNorms(q=jnp.ones(D, DTYPE), k=jnp.ones(D, DTYPE), eps=EPS)

    def make(seed: int) -> tuple[Arrays, Arrays]:
        angle = normal(seed, batch * queries, D // 2, dtype=jnp.float32)
        heads = normal(seed + 1, batch * queries, H + 2 * G, D)
        pool = pool_of(seed + 2, num_pages, PAGE, 2 * G, D, kv=kv)
        return (heads, jnp.cos(angle), jnp.sin(angle), scales_of(kv)), pool

    def run(ops: Ops, arguments: Arrays, pool: jax.Array) -> tuple[Arrays, Arrays]:
        *given, scales = arguments
        write: Callable[..., Any] = kv_write.rotate_and_write
        if isinstance(ops, GpuOps):
            from jspec.pallas_kernels.kv_write import gpu

            write = partial(gpu.rotate_and_write, interpret=ops.interpret)
        q, pool = write(*given, pool, page, offset, num_heads=H, norms=norms, scales=scales)
        return (() if scales else q), pool  # with scales, the kernel's q is times K's

    return Case(
        make=make,
        run=run,
        num_bytes=batch * queries * D * (2 * BYTES * H + (BYTES + KV_DTYPES[kv].itemsize) * 2 * G),
        decode_tokens=batch * queries,
        worst=0.02 if kv == "bfloat16" else 0.1,  # the step of e4m3 after its largest numbers
    )


def commit(shape: ModelShape, *, batch: int, nodes: int, levels: int, layers: int) -> Case:
    """The move of an accepted path's entries to the front of their rows, in all layers."""
    _, G, D = shape.heads
    rows, num_pages, _ = rows_of(batch, nodes, PAGE, packed=False, tree=False)
    path = jnp.tile(jnp.linspace(0, nodes - 1, levels + 1).astype(jnp.int32), (batch, 1))
    accepted = jnp.full(batch, levels, jnp.int32)

    def make(seed: int) -> tuple[Arrays, Arrays]:
        pools = [normal(seed + i, num_pages, PAGE, 2 * G, D) for i in range(layers)]
        return (rows.page_table, rows.prefix_lens, path, accepted), tuple(pools)

    def run(ops: Ops, arguments: Arrays, pools: Arrays) -> tuple[Arrays, Arrays]:
        return (), ops.commit(pools, *arguments)

    moved = batch * levels * 2 * G * D * layers
    return Case(make=make, run=run, num_bytes=2 * BYTES * moved, decode_tokens=batch * nodes)


# Norms and products.


def add_norm(shape: ModelShape, *, tokens: int) -> Case:
    E = shape.hidden_size

    def make(seed: int) -> tuple[Arrays, Arrays]:
        return (normal(seed, tokens, E), normal(seed + 1, tokens, E), normal(seed + 2, E)), ()

    return Case(
        make=make,
        run=pure(lambda ops, arguments: ops.add_norm(*arguments, eps=EPS)),
        num_bytes=BYTES * 4 * tokens * E,
        decode_tokens=tokens,
    )


def gated_mlp(
    shape: ModelShape, *, tokens: int, of_prompts: bool = False, columns: bool = False
) -> Case:
    """Gate and up with SiLU. columns: weights are stored as in an engine that drafts."""
    if isinstance(shape.ffn, MoESpec):
        raise ValueError("the model is an MoE; expected a dense MLP")
    E, inner = shape.widths

    def make(seed: int) -> tuple[Arrays, Arrays]:
        return (normal(seed, tokens, E), normal(seed + 1, E, 2 * inner, scale=E**-0.5)), ()

    def run(ops: Ops, arguments: Arrays) -> jax.Array:
        return ops.with_columns(columns).gated_product(*arguments, of_prompts=of_prompts)

    return Case(
        make=make,
        run=pure(run),
        num_bytes=BYTES * (2 * E * inner + tokens * (E + inner)),
        flops=4 * tokens * E * inner,
        decode_tokens=None if of_prompts else tokens,
        column_major=columns,
    )


def fp8_product(
    shape: ModelShape, *, product: str, tokens: int, blocks: bool = False, of_prompts: bool = False
) -> Case:
    """A product of an fp8 weight with the quantization of its tokens.

    product: "out", "down", or "gate_up" with SiLU. blocks: a scale per 128 x 128, else per channel.
    """
    if isinstance(shape.ffn, MoESpec):
        raise ValueError("the model is an MoE; expected a dense MLP")
    E, inner = shape.widths
    is_gated = product == "gate_up"
    k, n = {"out": (E, E), "down": (inner, E), "gate_up": (E, 2 * inner)}[product]
    format = FP8(has_blocks=blocks)

    def make(seed: int) -> tuple[Arrays, Arrays]:
        def array(spec: Any) -> jax.Array:
            if spec.dtype == "float32":
                return jnp.full(spec.shape, k**-0.5 / 64, jnp.float32)
            return normal(seed + 1, *spec.shape, scale=64).astype(spec.dtype)

        return (normal(seed, tokens, k), weight_of(format, (k, n), array)), ()

    def run(ops: Ops, arguments: Arrays) -> jax.Array:
        if is_gated:
            return ops.gated_product(*arguments, of_prompts=of_prompts)
        return ops.fp8_product(*arguments)

    return Case(
        make=make,
        run=pure(run),
        num_bytes=k * n + BYTES * tokens * (k + n // (1 + is_gated)),
        flops=tokens * k * n,  # half: fp8 multiplies twice as fast
        decode_tokens=None if of_prompts else tokens,
        column_major=True,
    )


def moe_weights(shape: ModelShape, seed: int) -> dict[str, dict[str, Any]]:
    """Return weights whose products are about one, in the stored format."""
    format = dict(shape.formats).get(Product.EXPERTS, Dense("bfloat16"))
    rng = iter(range(seed, seed + 100))

    def array(size: tuple[int, ...]) -> jax.Array:
        return normal(next(rng), *size, scale=size[-2] ** -0.5 if len(size) > 1 else 1.0)

    def packed(spec: Any) -> jax.Array:
        if spec.dtype == "uint32":  # four scales of 120, for a deviation of 2.9 / 128
            return jnp.full(spec.shape, 0x78787878, jnp.uint32)
        if spec.dtype == "float32":  # scales of fp8, for a deviation of 1 / 32
            return jnp.full(spec.shape, 1 / 1280, jnp.float32)
        if spec.dtype == "float8_e4m3fn":  # column-major, as a model's
            codes = normal(next(rng), *spec.shape, scale=40.0).astype(spec.dtype)
            return jax.device_put(codes, Format(Layout(major_to_minor=(0, 2, 1)), codes.sharding))
        return jax.random.bits(jax.random.key(next(rng)), spec.shape, jnp.dtype(spec.dtype))

    def experts(name: str, size: tuple[int, ...]) -> Any:
        is_packed = name in ("gate_up", "down") and not isinstance(format, Dense)
        return weight_of(format, size, packed) if is_packed else array(size)

    params, spec = shape.moe_params, moe_spec(shape)
    shared = {}
    if spec.shared is not None:
        E, inner = shape.hidden_size, spec.shared.inner
        sizes = {"gate_up": (E, 2 * inner), "down": (inner, E)}
        shared = {"shared": {name: {"kernel": array(size)} for name, size in sizes.items()}}
    router = {name: array(size) for name, size in params["router"].items()}
    if spec.has_router_bias:
        router["router_bias"] = router["router_bias"].astype(jnp.float32)
    return shared | {
        "router": router,
        "experts": {name: experts(name, size) for name, size in params["experts"].items()},
    }


def moe_floor(shape: ModelShape, spec: MoESpec, tokens: int) -> tuple[float, float]:
    """Return (bytes of the experts that uniformly drawn tokens use, operations of their
    products), without a shared expert."""
    format = dict(shape.formats).get(Product.EXPERTS, Dense("bfloat16"))
    sizes = [shape.moe_params["experts"][name] for name in ("gate_up", "down")]
    share = experts_touched(spec, tokens=tokens) / spec.num_experts
    flops = sum(2 * tokens * spec.top_k * math.prod(size[1:]) for size in sizes)
    return share * sum(weight_bytes(format, size) for size in sizes), flops


def moe_spec(shape: ModelShape) -> MoESpec:
    if not isinstance(shape.ffn, MoESpec):
        raise ValueError("the model has a dense MLP; expected an MoE")
    return shape.ffn


def experts(shape: ModelShape, *, tokens: int) -> Case:
    """The products of each token's experts and their weighted sum."""
    spec = moe_spec(shape)
    read, flops = moe_floor(shape, spec, tokens)

    def make(seed: int) -> tuple[Arrays, Arrays]:
        keys = jax.random.split(jax.random.key(seed))
        order = jnp.argsort(jax.random.uniform(keys[0], (tokens, spec.num_experts)), axis=1)
        weights = jax.nn.softmax(jax.random.normal(keys[1], (tokens, spec.top_k)))
        params = dict(moe_weights(shape, seed)["experts"])
        params.pop("down_bias", None)
        ids = order[:, : spec.top_k].astype(jnp.int32)
        return (normal(seed, tokens, shape.hidden_size), ids, weights, params), ()

    return Case(
        make=make,
        run=pure(lambda ops, arguments: ops.experts(*arguments, gate=spec.gate)),
        num_bytes=read,
        flops=flops,
        decode_tokens=tokens,
    )


def moe(shape: ModelShape, *, tokens: int) -> Case:
    """A whole MoE layer: add and norm, router, experts, and the next add and norm."""
    spec, E = moe_spec(shape), shape.hidden_size

    def make(seed: int) -> tuple[Arrays, Arrays]:
        x, delta = normal(seed, tokens, E), normal(seed + 1, tokens, E)
        return (x, delta, normal(seed + 2, E), moe_weights(shape, seed)), ()

    def run(ops: Ops, arguments: Arrays) -> Arrays:
        x, delta, scale, params = arguments
        stream, norm = Residual(x=x, delta=delta), {"scale": scale}
        out = moe_of_sum(params, norm, stream, spec=spec, eps=EPS, shard=Shard(), ops=ops)
        return norm_of_sum(norm, out, eps=EPS, ops=ops)

    read, flops = moe_floor(shape, spec, tokens)
    shared = 0 if spec.shared is None else 3 * E * spec.shared.inner
    return Case(
        make=make,
        run=pure(run),
        num_bytes=read + BYTES * shared,
        flops=flops + 2 * tokens * shared,
        decode_tokens=tokens,
        # A near tie of two experts is decided by a rounding, and changes a token's whole output.
        left_out=1 / 16,
    )


# Choice of tokens.


def sampling_rows(batch: int, seed: int, temperature: float) -> dict[str, jax.Array]:
    return {
        "temperature": jnp.full(batch, temperature, jnp.float32),
        "seed": jax.random.bits(jax.random.key(seed), (batch, 2), jnp.uint32),
    }


def sample(shape: ModelShape, *, batch: int, nodes: int, temperature: float) -> Case:
    """The target's token at every node."""
    V = shape.vocab_size

    def make(seed: int) -> tuple[Arrays, Arrays]:
        logits = normal(seed, batch, nodes, V, scale=3.0, dtype=jnp.float32)
        positions = seed + jnp.arange(batch * nodes, dtype=jnp.int32).reshape(batch, nodes)
        return (logits, positions, sampling_rows(batch, seed, temperature)), ()

    def run(ops: Ops, arguments: Arrays) -> Arrays:
        logits, positions, rows = arguments
        ids = jnp.arange(V, dtype=jnp.int32)
        how = {"positions": positions, "token_ids": ids, "threshold": None, "is_split": False}
        return ops.sample(logits, **rows, **how)

    return Case(make=make, run=pure(run), num_bytes=4 * batch * nodes * V, worst=1e-6)


def rank(shape: ModelShape, *, batch: int, topk: int, temperature: float) -> Case:
    """The best candidates of a level's nodes over the draft's vocabulary, here the target's."""
    U = shape.vocab_size

    def make(seed: int) -> tuple[Arrays, Arrays]:
        logits = normal(seed, batch, topk, U, scale=3.0, dtype=jnp.float32)
        positions = seed + jnp.arange(batch * topk, dtype=jnp.int32).reshape(batch, topk)
        return (logits, positions, sampling_rows(batch, seed, temperature)), ()

    def run(ops: Ops, arguments: Arrays) -> Arrays:
        logits, positions, rows = arguments
        how = {"positions": positions, "token_ids": jnp.arange(U, dtype=jnp.int32)}
        return ops.rank(logits, **rows, **how, topk=topk, lowest=LOWEST)

    return Case(make=make, run=pure(run), num_bytes=4 * batch * topk * U, worst=1e-4)


def gather(shape: ModelShape, *, batch: int, nodes: int, levels: int) -> Case:
    """Emitted tokens, the bonus token and three layers' features of the accepted path."""
    A = 3 * shape.hidden_size
    path = jnp.tile(jnp.linspace(0, nodes - 1, levels + 1).astype(jnp.int32), (batch, 1))

    def make(seed: int) -> tuple[Arrays, Arrays]:
        ids = jax.random.randint(jax.random.key(seed), (batch, nodes), 0, shape.vocab_size)
        accepted = jnp.full(batch, levels, jnp.int32)
        return (ids.astype(jnp.int32), normal(seed, batch, nodes, A), path, accepted), ()

    num_bytes = 2 * BYTES * batch * (levels + 1) * A
    run = pure(lambda ops, arguments: ops.gather_emitted(*arguments))
    return Case(make=make, run=run, num_bytes=num_bytes, decode_tokens=batch * nodes, worst=0.0)


Sizes = Mapping[str, Any]


def crossed(**values: tuple[Any, ...]) -> tuple[Sizes, ...]:
    """Return all combinations."""
    found: list[dict[str, Any]] = [{}]
    for name, each in values.items():
        found = [{**sizes, name: value} for sizes in found for value in each]
    return tuple(found)


BATCHES = (1, 8, 64)
PREFILL: Sizes = {"packed": True}
OPS: Mapping[str, tuple[Callable[..., Case], tuple[Sizes, ...]]] = {
    "attention": (attend, crossed(batch=BATCHES, queries=(1, 4, 16), context=(1168, 8192))),
    "attention_fp8": (
        attend,
        crossed(batch=BATCHES, queries=(1, 4, 16), context=(1024, 8192), kv=tuple(KV_DTYPES)),
    ),
    "kv_write_fp8": (write_kv, crossed(batch=(1, 64), queries=(1, 4), kv=tuple(KV_DTYPES))),
    "prefill": (
        attend,
        (
            {**PREFILL, "batch": 1, "queries": 1024, "context": 1024},
            {**PREFILL, "batch": 2, "queries": 1024, "context": 1024},
            {**PREFILL, "batch": 1, "queries": 8192, "context": 8192},
            {**PREFILL, "batch": 1, "queries": 2048, "context": 8192},
        ),
    ),
    "kv_write": (write_kv, ({"batch": 1, "queries": 1}, *crossed(batch=(64,), queries=(4, 32)))),
    "compaction": (
        commit,
        tuple({"batch": b, "nodes": 16, "levels": 3, "layers": 32} for b in (1, 64)),
    ),
    "bonus_token": (gather, tuple({"batch": b, "nodes": 16, "levels": 3} for b in (1, 64))),
    "add_norm": (add_norm, crossed(tokens=(1, 64, 2048))),
    "gated_mlp": (
        gated_mlp,
        (
            *crossed(tokens=(1, 4, 16, 64, 256, 1024), columns=(False, True)),
            *crossed(tokens=(1024, 8192), of_prompts=(True,)),
        ),
    ),
    "fp8_product": (
        fp8_product,
        crossed(
            product=("out", "down", "gate_up"),
            tokens=(1, 8, 64, 256, 1024),
            blocks=(False, True),
        ),
    ),
    "experts": (experts, crossed(tokens=(1, 8, 64, 256, 2048))),
    "moe": (moe, crossed(tokens=(1, 8, 16, 64, 256))),
    "sample": (sample, crossed(batch=(1, 64), nodes=(1, 16), temperature=(0.0, 1.0))),
    "rank": (rank, crossed(batch=BATCHES, topk=(1, 4), temperature=(0.0, 1.0))),
}
