"""The weight formats that a bundle's products read: one table, read when a model is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from jspec.errors import ConfigError
from jspec.spec.weight_format import FORMATS, FP8, INT8, MXFP4, Dense, Op, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    dtype: str | None = None  # of the model; None: any
    most_shards: int | None = None  # None: any number

    def problem(self, *, dtype: str, shards: int) -> str | None:
        if self.dtype not in (None, dtype):
            return f"its kernel is for {self.dtype}"
        if self.most_shards is not None and shards > self.most_shards:
            return f"its kernel is for {self.most_shards} shard, not {shards}"
        return None


BUNDLES = ("reference", "xla", "tpu", "gpu")
# (format, product, Ops.name) -> its kernel; None: no kernel, so the weights are unpacked.
TABLE: Mapping[tuple[type[WeightFormat], Op, str], Reads | None] = {
    **{
        (kind, op, bundle): Reads() if kind is Dense else None
        for kind, op, bundle in itertools.product(FORMATS, Op, BUNDLES)
    },
    # Faster than dense weights for any number of tokens (benchmarks/results).
    (MXFP4, Op.EXPERTS, "gpu"): Reads(dtype="bfloat16", most_shards=1),
    **{
        (kind, op, bundle): Reads()
        for kind, op, bundle in itertools.product((FP8, INT8), (Op.LINEAR, Op.GATED), BUNDLES)
    },
    # XLA unpacks one layer's experts at a time. On a TPU that would read experts without tokens.
    **{(FP8, Op.EXPERTS, bundle): Reads() for bundle in ("reference", "xla", "gpu")},
}


def resident_format(
    stored: WeightFormat, op: Op, *, bundle: str, dtype: str, shards: int
) -> tuple[WeightFormat, str]:
    """Return a product's resident format and the decision as a sentence. Raises ConfigError."""
    if (type(stored), op, bundle) not in TABLE:
        raise ConfigError(
            f"weights of {op.value} are stored as {stored.name}, and the kernels are {bundle}; "
            f"expected a row for both in pallas_kernels/formats.py"
        )
    reads = TABLE[type(stored), op, bundle]
    why = f"{bundle} has no kernel for it"
    if reads is not None:
        problem = reads.problem(dtype=dtype, shards=shards)
        if problem is None:
            return stored, f"{op.value}: {stored.name}, kept packed"
        why = problem
    return Dense(dtype), f"{op.value}: {stored.name}, unpacked to {dtype}: {why}"
