"""What one_token_gpu.py does thread by thread, as arrays of Pallas would not: the choice of
experts, a row's way to shared memory, and the counter at which programs wait for each other.

Each function runs in all 128 threads of one warpgroup. Mosaic GPU's own operations, inlined.
"""

from __future__ import annotations

import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from jspec.core.model_spec import Gate, Routing
from jspec.pallas_kernels.experts.reference import CLAMP, SLOPE

LANES = 128
LOWEST, HIGHEST = -(2**31), 2**31 - 1
VECTOR = 8  # elements of 2 bytes that one thread copies at once
FEW = 4  # that one thread makes at once


def _utils() -> Any:
    return mgpu.utils


def _const(value: float, kind: Any) -> Any:
    return _utils().c(value, kind)


def _thread() -> Any:
    """This thread's place in its warpgroup, an i32."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.andi(_utils().thread_idx(), _const(LANES - 1, i32))


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _at(*indices: int) -> list[Any]:
    return [_const(i, ir.IndexType.get()) for i in indices]


def _compare(kind: str, first: Any, second: Any) -> Any:
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), first, second)


def copy_row(source: Any, target: Any, size: int) -> None:
    """target[:size] = source[:size], of global and of shared memory, 2 bytes an element."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))  # type: ignore[untyped-decorator]
    def run(_: Any, source: Any, target: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        pack = ir.VectorType.get((VECTOR,), ir.MemRefType(source.type).element_type)
        _utils().warpgroup_barrier()  # nobody reads the row before any more
        thread, pieces = _thread(), size // VECTOR
        for first in range(0, pieces, LANES):
            piece = arith.addi(thread, _const(first, i32))

            def copy(piece: Any = piece) -> None:
                where = _index(arith.muli(piece, _const(VECTOR, i32)))
                vector.store(vector.load(pack, source, [where]), target, [where])

            if first + LANES <= pieces:
                copy()
            else:
                with _utils().when(_compare("slt", piece, _const(pieces, i32))):
                    copy()
        _utils().warpgroup_barrier()

    run(source, target)


def arrive(counter: Any) -> None:
    """Says that all of what this warpgroup has written may be read by who waits."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))  # type: ignore[untyped-decorator]
    def run(_: Any, counter: Any) -> None:
        _utils().warpgroup_barrier()
        _utils().SemaphoreRef(_utils().memref_ptr(counter)).signal(1, memory_scope="gpu")

    run(counter)


def wait_for(counter: Any, count: int) -> None:
    """Until so many have arrived."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))  # type: ignore[untyped-decorator]
    def run(_: Any, counter: Any) -> None:
        pointer = _utils().memref_ptr(counter)
        _utils().SemaphoreRef(pointer).wait(count, decrement=False, memory_scope="gpu")

    run(counter)


def store_row(values: Any, target: Any) -> None:
    """target[:] = one row of values, which are [64, N] of equal rows, N <= 128."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))  # type: ignore[untyped-decorator]
    def run(_: Any, values: Any, target: Any) -> None:
        # Each eight columns are written by who holds them in the row of their number: one warp.
        eight = _const(8, ir.IndexType.get())
        places = values.layout.thread_idxs(values.shape)
        for (row, column), pair in zip(places, values.registers.flat, strict=True):
            with _utils().when(_compare("eq", row, arith.divui(column, eight))):
                vector.store(pair, target, [column])

    run(values, target)


def gate_row(partials: Any, bias: Any, row: Any, *, inner: int, gate: Gate) -> None:
    """row[:inner] = the gated sums of the partial products of one pair, rounded as few_gpu does.

    partials f32[S, 2, I or more], of global memory; bias [2 * inner]; row in shared memory.
    """
    num_parts = partials.shape[0]
    refs = [partials, row, *([] if bias is None else [bias])]

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))  # type: ignore[untyped-decorator]
    def run(_: Any, partials: Any, row: Any, *bias: Any) -> None:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        narrow = ir.MemRefType(row.type).element_type
        wide_pack, narrow_pack = (ir.VectorType.get((FEW,), kind) for kind in (f32, narrow))
        _utils().warpgroup_barrier()  # nobody reads the row before any more
        thread, pieces = _thread(), inner // FEW

        def rounded(x: Any) -> Any:
            return arith.extf(wide_pack, arith.truncf(narrow_pack, x))

        def one(piece: Any) -> None:
            start = arith.muli(piece, _const(FEW, i32))
            where = _index(start)
            both = []
            for half in range(2):
                parts = [
                    vector.load(wide_pack, partials, [*_at(part, half), where])
                    for part in range(num_parts)
                ]
                total = rounded(_reduced(parts, arith.addf))
                if bias:
                    at = _index(arith.addi(start, _const(half * inner, i32)))
                    added = arith.extf(wide_pack, vector.load(narrow_pack, bias[0], [at]))
                    total = rounded(arith.addf(total, added))
                both.append(total)
            vector.store(arith.truncf(narrow_pack, _gated(*both, gate=gate)), row, [where])

        for first in range(0, pieces, LANES):
            piece = arith.addi(thread, _const(first, i32))
            if first + LANES <= pieces:
                one(piece)
            else:
                with _utils().when(_compare("slt", piece, _const(pieces, i32))):
                    one(piece)
        _utils().warpgroup_barrier()

    run(*refs)


def _reduced(values: list[Any], op: Any) -> Any:
    """op over all, in pairs."""
    while len(values) > 1:
        pairs = [op(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def _gated(first: Any, up: Any, *, gate: Gate) -> Any:
    """reference.gated of f32 vectors."""
    kind = first.type

    def const(value: float) -> Any:
        scalar = ir.FloatAttr.get(ir.F32Type.get(), value)
        return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, scalar))

    def by_sigmoid(x: Any, slope: float) -> Any:
        exponent = arith.mulf(x, const(-slope * math.log2(math.e)))
        power = exponent
        for i in range(FEW):
            part = vector.extract(exponent, [], [i])
            part = _utils().inline_ptx(
                "ex2.approx.ftz.f32 $0, $1;", part, result_types=ir.F32Type.get()
            )
            power = vector.insert(part, power, [], [i])
        return arith.mulf(x, arith.divf(const(1.0), arith.addf(const(1.0), power)))

    def clipped(x: Any) -> Any:
        return arith.minimumf(arith.maximumf(x, const(-CLAMP)), const(CLAMP))

    if gate is Gate.SILU:
        return arith.mulf(by_sigmoid(first, 1.0), up)
    if gate is Gate.SILU_WITHIN_7:
        return arith.mulf(arith.minimumf(by_sigmoid(first, 1.0), const(CLAMP)), clipped(up))
    first = arith.minimumf(first, const(CLAMP))
    return arith.mulf(arith.addf(clipped(up), const(1.0)), by_sigmoid(first, SLOPE))


def choose(
    shares: Any,
    bias: Any,
    table: Any,
    sums: Any,
    best: Any,
    ids: Any,
    weights: Any,
    is_first: Any,
    *,
    top_k: int,
    routing: Routing,
    dtype: Any,
) -> None:
    """The top_k experts, best first, to best[0]; ids and weights of the first program to memory.

    shares f32[S, 1, X], X <= 128; table i32[128], sums f32[2, 4] and best
    i32[2, 16] in shared memory. As
    routing_gpu's `scores_of`, `ranked` and `at_rank`: ranks are counted.
    """
    num_shares, _, num_experts = shares.shape
    refs = [shares, table, sums, best, ids, weights, *([] if bias is None else [bias])]

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(*(plgpu.RefType() for _ in refs), plgpu.Layout.WG_SPLAT)
    )
    def run(_: Any, *operands: Any) -> None:
        shares, table, sums, best, ids, weights, *bias_ref, first = operands
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        narrow = _utils().dtype_to_ir_type(dtype)
        thread = _thread()
        me = _index(thread)
        is_expert = _compare("slt", thread, _const(num_experts, i32))
        expert = _index(arith.minsi(thread, _const(num_experts - 1, i32)))

        def rounded(x: Any) -> Any:
            return arith.extf(f32, arith.truncf(narrow, x))

        def keys() -> list[Any]:
            """Of all experts, from the table."""
            pack = ir.VectorType.get((4,), i32)
            found = []
            for start in range(0, num_experts, 4):
                four = vector.load(pack, table, _at(start))
                found += [vector.extract(four, [], [i]) for i in range(4)]
            return found[:num_experts]

        def whole(value: Any, op: Any, line: int) -> Any:
            """op over all threads."""
            for distance in (16, 8, 4, 2, 1):
                value = op(value, _utils().shfl_bfly(value, distance))
            warp = _index(arith.divui(thread, _const(32, i32)))
            memref.store(value, sums, [*_at(line), warp])
            _utils().warpgroup_barrier()
            return _reduced([memref.load(sums, _at(line, i)) for i in range(LANES // 32)], op)

        parts = [memref.load(shares, [*_at(share, 0), expert]) for share in range(num_shares)]
        score = rounded(_reduced(parts, arith.addf))
        if bias_ref:
            added = arith.extf(f32, memref.load(bias_ref[0], [expert]))
            score = rounded(arith.addf(score, added))
        lowest = _const(-math.inf, f32)
        peak = whole(arith.select(is_expert, score, lowest), arith.maximumf, 0)
        exponent = arith.mulf(arith.subf(score, peak), _const(math.log2(math.e), f32))
        power = _utils().inline_ptx("ex2.approx.f32 $0, $1;", exponent, result_types=f32)
        power = arith.select(is_expert, power, _const(0.0, f32))
        height = score
        if routing is not Routing.TOP_THEN_SOFTMAX:
            power = arith.divf(power, whole(power, arith.addf, 1))
            height = power
        bits = arith.bitcast(i32, height)
        is_negative = _compare("slt", bits, _const(0, i32))
        key = arith.select(is_negative, arith.xori(bits, _const(HIGHEST, i32)), bits)
        is_nan = arith.cmpf(arith.CmpFPredicate.UNO, height, height)
        key = arith.select(is_nan, _const(HIGHEST, i32), key)
        key = arith.select(is_expert, key, _const(LOWEST, i32))
        memref.store(key, table, [me])
        _utils().warpgroup_barrier()
        ahead = []
        for i, other in enumerate(keys()):
            is_before = _compare("sgt", thread, _const(i, i32))
            is_as_high = arith.andi(_compare("eq", other, key), is_before)
            is_ahead = arith.ori(_compare("sgt", other, key), is_as_high)
            ahead.append(arith.extui(i32, is_ahead))
        rank = _reduced(ahead, arith.addi)
        is_chosen = arith.andi(is_expert, _compare("slt", rank, _const(top_k, i32)))
        with _utils().when(is_chosen):
            memref.store(thread, best, [*_at(0), _index(rank)])
            memref.store(arith.bitcast(i32, power), best, [*_at(1), _index(rank)])
        _utils().warpgroup_barrier()
        is_first = first.registers.flat[0]
        is_pair = _compare("slt", thread, _const(top_k, i32))
        with _utils().when(arith.andi(is_first, is_pair)):
            chosen = [
                arith.bitcast(f32, memref.load(best, _at(1, place))) for place in range(top_k)
            ]
            weight = arith.bitcast(f32, memref.load(best, [*_at(1), me]))
            if routing is not Routing.SOFTMAX_THEN_TOP:
                weight = arith.divf(weight, _reduced(chosen, arith.addf))
            memref.store(memref.load(best, [*_at(0), me]), ids, [*_at(0), me])
            memref.store(weight, weights, [*_at(0), me])

    run(*refs, is_first)
