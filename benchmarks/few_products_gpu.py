"""A dense layer's products for few tokens by Triton, beside XLA's: an experiment, not kept.

python -m benchmarks.few_products_gpu --seconds 150
"""

# mypy: ignore-errors
# ruff: noqa
from __future__ import annotations
import argparse, functools, json, time
from functools import partial
from statistics import median
from typing import Any
import jax, jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.experimental.layout import Format, Layout as Order
from jspec.pallas_kernels.add_norm.gpu import add_and_norm

EPS = 1e-5


def kernel(*refs, num_parts, has_norm, gated, turned, shares, rows, bn, bk, width):
    """One tile of columns (and of inputs)."""
    refs = list(refs)
    x_ref = refs.pop(0)
    parts_ref = refs.pop(0) if has_norm and num_parts else None
    scale_ref = refs.pop(0) if has_norm else None
    w_ref = refs.pop(0)
    out_ref = refs.pop(0)
    total_ref = refs.pop(0) if has_norm else None
    num_tokens, size = x_ref.shape
    token = jnp.arange(rows, dtype=jnp.int32)
    is_token = (token < num_tokens)[:, None]
    tile = pl.program_id(0)
    column = tile * bn + jnp.arange(bn, dtype=jnp.int32)
    columns = (column, width + column) if gated else (column,)
    step = jnp.arange(bk, dtype=jnp.int32)
    share = pl.program_id(1) if shares > 1 else 0
    depth = size // shares
    first = share * depth

    def add(k, carry):
        sums, squares = carry
        at = first + k * bk + step
        left = plt.load(x_ref.at[token[:, None], at[None]], mask=is_token, other=0.0)
        if has_norm:
            if parts_ref is not None:
                if num_parts == 1:
                    delta = plt.load(
                        parts_ref.at[token[:, None], at[None]], mask=is_token, other=0.0
                    )
                else:
                    delta = sum(
                        plt.load(
                            parts_ref.at[i, token[:, None], at[None]], mask=is_token, other=0.0
                        )
                        for i in range(num_parts)
                    ).astype(left.dtype)
                left = left + delta

            @pl.when(tile == 0)
            def _():
                plt.store(total_ref.at[token[:, None], at[None]], left, mask=is_token)

            wide = left.astype(jnp.float32)
            squares = squares + jnp.sum(wide * wide, axis=1)
            scale = plt.load(scale_ref.at[at]).astype(jnp.float32)
            left = (wide * scale[None]).astype(x_ref.dtype)
        if turned:
            right = [plt.load(w_ref.at[c[:, None], at[None]]) for c in columns]
            parts = [jnp.dot(left, w.T, preferred_element_type=jnp.float32) for w in right]
        else:
            right = [plt.load(w_ref.at[at[:, None], c[None]]) for c in columns]
            parts = [jnp.dot(left, w, preferred_element_type=jnp.float32) for w in right]
        return tuple(a + b for a, b in zip(sums, parts)), squares

    zeros = tuple(jnp.zeros((rows, bn), jnp.float32) for _ in columns)
    sums, squares = lax.fori_loop(0, depth // bk, add, (zeros, jnp.zeros((rows,), jnp.float32)))
    if has_norm:
        factor = lax.rsqrt(squares / size + EPS)[:, None]
        sums = tuple(s * factor for s in sums)
    result = sums[0]
    if gated:
        gate, up = (s.astype(jnp.bfloat16).astype(jnp.float32) for s in sums)
        result = gate * jax.nn.sigmoid(gate) * up
    result = result.astype(out_ref.dtype)
    if shares > 1:
        plt.store(out_ref.at[share, token[:, None], column[None]], result, mask=is_token)
    else:
        plt.store(out_ref.at[token[:, None], column[None]], result, mask=is_token)


def kernel_one(*refs, num_parts, has_norm, gated, turned, shares, rows, bn, bk, width):
    """One token: products by fma, sums [bk, bn] kept apart until the end."""
    refs = list(refs)
    x_ref = refs.pop(0)
    parts_ref = refs.pop(0) if has_norm and num_parts else None
    scale_ref = refs.pop(0) if has_norm else None
    w_ref = refs.pop(0)
    out_ref = refs.pop(0)
    total_ref = refs.pop(0) if has_norm else None
    _, size = x_ref.shape
    tile = pl.program_id(0)
    zero = tile * 0
    column = tile * bn + jnp.arange(bn, dtype=jnp.int32)
    columns = (column, width + column) if gated else (column,)
    step = jnp.arange(bk, dtype=jnp.int32)
    share = pl.program_id(1) if shares > 1 else 0
    depth = size // shares
    first = share * depth
    UNROLL = 4

    def fetch(k):
        at = first + k * bk + step
        if turned:
            right = [plt.load(w_ref.at[c[:, None], at[None]]) for c in columns]
        else:
            right = [plt.load(w_ref.at[at[:, None], c[None]]) for c in columns]
        left = plt.load(x_ref.at[zero, at])
        deltas = []
        scale = None
        if has_norm:
            if parts_ref is not None:
                deltas = (
                    [plt.load(parts_ref.at[zero, at])]
                    if num_parts == 1
                    else [plt.load(parts_ref.at[i, zero, at]) for i in range(num_parts)]
                )
            scale = plt.load(scale_ref.at[at])
        return at, right, left, deltas, scale

    def add(k, carry):
        sums, squares = carry
        fetched = [fetch(k * UNROLL + i) for i in range(UNROLL)]
        for at, right, left, deltas, scale in fetched:
            if has_norm:
                if deltas:
                    left = left + sum(deltas).astype(left.dtype)

                @pl.when(tile == 0)
                def _():
                    plt.store(total_ref.at[zero, at], left)

                wide = left.astype(jnp.float32)
                squares = squares + wide * wide
                left = (wide * scale.astype(jnp.float32)).astype(x_ref.dtype)
            wide = left.astype(jnp.float32)
            wide = wide[None] if turned else wide[:, None]
            sums = tuple(s + w.astype(jnp.float32) * wide for s, w in zip(sums, right))
        return sums, squares

    shape = (bn, bk) if turned else (bk, bn)
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in columns)
    sums, squares = lax.fori_loop(
        0, depth // (bk * UNROLL), add, (zeros, jnp.zeros((bk,), jnp.float32))
    )
    sums = [jnp.sum(s, axis=1 if turned else 0) for s in sums]
    if has_norm:
        factor = lax.rsqrt(jnp.sum(squares) / size + EPS)
        sums = [s * factor for s in sums]
    result = sums[0]
    if gated:
        gate, up = (s.astype(jnp.bfloat16).astype(jnp.float32) for s in sums)
        result = gate * jax.nn.sigmoid(gate) * up
    result = result.astype(out_ref.dtype)
    if shares > 1:
        plt.store(out_ref.at[share, zero, column], result)
    else:
        plt.store(out_ref.at[zero, column], result)


def run(
    x,
    w,
    *,
    parts=None,
    scale=None,
    gated=False,
    turned=False,
    shares=1,
    bn=64,
    bk=64,
    warps=4,
    stages=4,
    one=False,
):
    """w: [K, N], or [N, K] if turned."""
    T, K = x.shape
    N = w.shape[0] if turned else w.shape[1]
    width = N // 2 if gated else N
    has_norm = scale is not None
    num_parts = 0 if parts is None else (1 if parts.ndim == 2 else parts.shape[0])
    ins = [x] + ([parts] if num_parts else []) + ([scale] if has_norm else []) + [w]
    shape = (T, width) if shares == 1 else (shares, T, width)
    outs = [jax.ShapeDtypeStruct(shape, x.dtype if shares == 1 else jnp.float32)]
    if has_norm:
        outs.append(jax.ShapeDtypeStruct((T, K), x.dtype))
    rows = max(16, pl.next_power_of_2(T))
    body = kernel_one if one else kernel
    got = pl.pallas_call(
        partial(
            body,
            num_parts=num_parts,
            has_norm=has_norm,
            gated=gated,
            turned=turned,
            shares=shares,
            rows=rows,
            bn=bn,
            bk=bk,
            width=width,
        ),
        grid=(width // bn,) + ((shares,) if shares > 1 else ()),
        out_shape=outs,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        name="few_dense",
    )(*ins)
    return got if has_norm else got[0]


SIZES = {"1b": (2048, 3072, 8192, 2048), "8b": (4096, 6144, 14336, 4096)}
LAYERS = {"1b": 16, "8b": 12}


def served(x, delta, ws, turned):
    scale = ws["scale"]
    x, n = add_and_norm(x, delta, scale, eps=EPS)
    qkv = n @ ws["qkv"]
    heads = lax.optimization_barrier(qkv[:, : x.shape[1]])
    out = heads @ ws["out"]
    x, n = add_and_norm(x, out, scale, eps=EPS)
    y = n @ (ws["gate_up"].T if turned else ws["gate_up"])
    gate, up = jnp.split(y, 2, axis=-1)
    inner = jax.nn.silu(gate) * up
    return x, inner @ ws["down"]


def mine(x, delta, ws, turned, *, norm, q, o, g, d):
    """norm: inside the products, or a launch of its own."""
    scale = ws["scale"]
    if norm:
        qkv, x = run(x, ws["qkv"], parts=delta, scale=scale, **q)
    else:
        x, n = add_and_norm(x, delta, scale, eps=EPS)
        qkv = run(n, ws["qkv"], **q)
    if qkv.ndim == 3:
        qkv = qkv.sum(0).astype(x.dtype)
    out = run(qkv[:, : x.shape[1]], ws["out"], **o)
    if norm:
        inner, x = run(x, ws["gate_up"], parts=out, scale=scale, gated=True, turned=turned, **g)
    else:
        x, n = add_and_norm(x, out, scale, eps=EPS)
        inner = run(n, ws["gate_up"], gated=True, turned=turned, **g)
    return x, run(inner, ws["down"], **d)


def mixed(x, delta, ws, turned, *, q, o, g, d):
    """Only some products by kernels: None is XLA's."""
    scale = ws["scale"]
    x, n = add_and_norm(x, delta, scale, eps=EPS)
    qkv = n @ ws["qkv"] if q is None else run(n, ws["qkv"], **q)
    heads = lax.optimization_barrier(qkv[:, : x.shape[1]])
    out = heads @ ws["out"] if o is None else run(heads, ws["out"], **o)
    x, n = add_and_norm(x, out, scale, eps=EPS)
    if g is None:
        y = n @ (ws["gate_up"].T if turned else ws["gate_up"])
        gate, up = jnp.split(y, 2, axis=-1)
        inner = jax.nn.silu(gate) * up
    else:
        inner = run(n, ws["gate_up"], gated=True, turned=turned, **g)
    return x, inner @ ws["down"] if d is None else run(inner, ws["down"], **d)


def P(bn, bk, shares=1, warps=4, stages=4, one=False):
    return dict(bn=bn, bk=bk, shares=shares, warps=warps, stages=stages, one=one)


def variants(model):
    big = model == "8b"
    v = {"served": served}
    # columns and splits so that there are a few hundred programs
    q = P(32, 128, 2 if not big else 2)
    o = P(32, 128, 4 if not big else 2)
    g = P(32, 128)
    d = P(32, 128, 8 if not big else 4)
    v["sums fused"] = partial(mixed, q=None, o=o, g=None, d=d)
    v["gate fused"] = partial(mixed, q=None, o=None, g=g, d=None)
    v["gate 64"] = partial(mixed, q=None, o=None, g=P(64, 64), d=None)
    v["gate 16"] = partial(mixed, q=None, o=None, g=P(16, 256), d=None)
    v["sums, gate"] = partial(mixed, q=None, o=o, g=g, d=d)
    v["sums 64, gate"] = partial(
        mixed, q=None, o=P(64, 64, o["shares"]), g=g, d=P(64, 64, d["shares"])
    )
    v["sums 64x128, gate"] = partial(
        mixed,
        q=None,
        o=P(64, 128, o["shares"] * 2, stages=3),
        g=g,
        d=P(64, 128, d["shares"] * 2, stages=3),
    )
    v["all apart"] = partial(mixed, q=P(32, 128), o=o, g=g, d=d)
    o4, d4 = P(32, 128, 2), P(32, 128, 4)
    v["norms inside"] = partial(
        mine, norm=True, q=P(16, 64, stages=3), o=o4, g=P(32, 64, stages=3), d=d4
    )
    v["norms inside, q32"] = partial(
        mine, norm=True, q=P(32, 64, stages=3), o=o4, g=P(16, 128, stages=2), d=d4
    )
    return v


def ones(model, turned):
    o = P(64, 32, 4, one=True)
    d = P(64, 32, 8, one=True)
    o2, d2 = P(128, 16, 8, one=True), P(128, 16, 16, one=True)
    g = P(16, 128, one=True) if turned else P(32, 32, one=True)
    g2 = P(8, 256, one=True) if turned else P(64, 16, one=True)
    q, q2 = P(32, 32, one=True), P(64, 16, one=True)
    return {
        "one: sums": partial(mixed, q=None, o=o, g=None, d=d),
        "one: sums 128": partial(mixed, q=None, o=o2, g=None, d=d2),
        "one: gate": partial(mixed, q=None, o=None, g=g, d=None),
        "one: gate 2": partial(mixed, q=None, o=None, g=g2, d=None),
        "one: all apart": partial(mixed, q=q, o=o, g=g, d=d),
        "one: norms inside": partial(mine, norm=True, q=q, o=o, g=g, d=d),
        "one: norms inside 2": partial(mine, norm=True, q=q2, o=o, g=g2, d=d),
    }


OPTIONS = {"xla_disable_hlo_passes": "rematerialization,dot-strength-reduction"}


def abstract(model, T, turned, sh):
    E, Q, I, A = SIZES[model]
    s = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=sh)
    ws = {
        "scale": s((E,)),
        "qkv": s((E, Q)),
        "out": s((A, E)),
        "gate_up": s((2 * I, E) if turned else (E, 2 * I)),
        "down": s((I, E)),
    }
    return s((T, E)), s((T, E)), [ws] * LAYERS[model]


def stack(layer, turned, x, delta, all_ws):
    one = jax.jit(partial(layer, turned=turned), inline=False)
    for ws in all_ws:
        x, delta = one(x, delta, ws)
    if delta.ndim == 3:
        delta = delta.sum(0).astype(x.dtype)
    return x + delta


def compiled(layer, model, T, turned, sh=None, options=OPTIONS):
    args = abstract(model, T, turned, sh)
    return jax.jit(partial(stack, layer, turned)).lower(*args).compile(compiler_options=options)


def concrete(model, T, turned):
    x, d, all_ws = abstract(model, T, turned, None)
    key = jax.random.key(0)

    def draw(i, s):
        fan = s.shape[1] if (turned and s.shape[0] == 2 * SIZES[model][2]) else s.shape[0]
        v = jax.random.normal(jax.random.fold_in(key, i), s.shape, jnp.float32)
        return (v * (fan**-0.5 if len(s.shape) == 2 and s.shape[0] > 64 else 1)).astype(
            jnp.bfloat16
        )

    leaves, tree = jax.tree.flatten((x, d, all_ws))
    draws = {}
    vals = []
    for i, s in enumerate(leaves):
        f = draws.setdefault(s.shape, jax.jit(lambda i, s=s: draw(i, s)))
        vals.append(f(i))
    x, d, ws = jax.tree.unflatten(tree, vals)
    for w in ws:
        w["scale"] = jnp.ones_like(w["scale"])
    return x, d, ws


def time_of(f, args):
    jax.block_until_ready(f(*args))
    found = []
    for _ in range(9):
        times = []
        for n in (10, 60):
            t = time.perf_counter()
            for _ in range(n):
                o = f(*args)
            jax.block_until_ready(o)
            times.append(time.perf_counter() - t)
        found.append((times[1] - times[0]) / 50)
    return median(found)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out")
    p.add_argument("--seconds", type=float, default=150)
    p.add_argument("--tokens", type=int, nargs="+", default=[1, 4])
    o = p.parse_args()
    start = time.monotonic()
    rows = []
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(12) as pool:
        for T in o.tokens:
            for model, turned in (("1b", False), ("1b", True), ("8b", False), ("8b", True)):
                if time.monotonic() - start > o.seconds:
                    continue
                vs = variants(model)
                if T == 1:
                    vs |= ones(model, turned)
                futures = {n: pool.submit(compiled, v, model, T, turned) for n, v in vs.items()}
                args = concrete(model, T, turned)
                base = None
                ready = {}
                for n, f in futures.items():
                    try:
                        ready[n] = f.result()
                    except Exception as e:
                        print(T, model, turned, n, "FAIL", repr(e)[:300], flush=True)
                for n, f in [*ready.items(), ("served again", ready["served"])]:
                    try:
                        out = f(*args).astype(jnp.float32)
                        if base is None:
                            base = out
                        err = float(jnp.linalg.norm(out - base) / jnp.linalg.norm(base))
                        us = 1e6 * time_of(f, args) / LAYERS[model]
                        rows.append(
                            dict(
                                T=T,
                                model=model,
                                turned=turned,
                                name=n,
                                us=round(us, 2),
                                err=round(err, 4),
                            )
                        )
                        print(rows[-1], flush=True)
                    except Exception as e:
                        print(T, model, turned, n, "FAIL", repr(e)[:300], flush=True)
                if o.out:
                    open(o.out, "w").write(json.dumps(rows))


if __name__ == "__main__":
    main()
