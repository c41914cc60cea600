"""The table of weight formats and products: it is total, and explains its decisions."""

from __future__ import annotations

import itertools

import pytest

from jspec.errors import ConfigError
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.formats import TABLE, Reads, resident_format
from jspec.spec.weight_format import FORMATS, FP8, MXFP4, Dense, Op, WeightFormat


def test_the_table_is_total() -> None:
    bundles = {ops.name for ops in OPS.values()}
    assert set(TABLE) == set(itertools.product(FORMATS, Op, bundles))
    for (kind, op, bundle), reads in TABLE.items():
        assert kind is not Dense or reads == Reads(), (op, bundle)  # nothing to unpack


@pytest.mark.parametrize(
    ("format", "bundle", "dtype", "shards", "decision"),
    [
        (MXFP4(), "gpu", "bfloat16", 1, "experts: mxfp4, kept packed"),
        (MXFP4(), "gpu", "float16", 1, "unpacked to float16: its kernel is for bfloat16"),
        (MXFP4(), "gpu", "bfloat16", 2, "unpacked to bfloat16: its kernel is for 1 shard, not 2"),
        (MXFP4(), "xla", "bfloat16", 1, "mxfp4, unpacked to bfloat16: xla has no kernel for it"),
        (FP8(), "gpu", "float16", 2, "experts: fp8, kept packed"),
        (FP8(has_blocks=True), "xla", "float32", 1, "experts: fp8, kept packed"),
        (FP8(), "tpu", "bfloat16", 1, "fp8, unpacked to bfloat16: tpu has no kernel for it"),
    ],
)
def test_what_stays_packed(
    format: WeightFormat, bundle: str, dtype: str, shards: int, decision: str
) -> None:
    found, said = resident_format(format, Op.EXPERTS, bundle=bundle, dtype=dtype, shards=shards)
    assert decision in said
    assert found == (format if "kept" in decision else Dense(dtype))


def test_a_pair_without_a_row_is_an_error_that_names_both() -> None:
    how = {"bundle": "metal", "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="linear are stored as mxfp4, and the kernels are metal"):
        resident_format(MXFP4(), Op.LINEAR, **how, shards=1)
