"""The packed i32 array: what goes in comes out, and a wrong shape never goes in."""

from __future__ import annotations

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.core.batch import DecodeBatch, PrefillBatch
from jspec.core.layout import PackedLayout, decode_layout, prefill_layout

DECODE = decode_layout(batch=3, num_grants=5)
PREFILL = prefill_layout(tokens=12, rows=2, pages_per_row=4, num_stop_ids=16)


def random_fields(layout: PackedLayout, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-(2**31), 2**31, shape, np.int32) for name, shape in layout.fields}


@pytest.mark.parametrize(
    ("layout", "batch"), [(DECODE, DecodeBatch), (PREFILL, PrefillBatch)], ids=["decode", "prefill"]
)
def test_layouts_name_the_fields_of_their_batches(layout: PackedLayout, batch: type) -> None:
    assert [name for name, _ in layout.fields] == [field.name for field in fields(batch)]


@pytest.mark.parametrize("layout", [DECODE, PREFILL], ids=["decode", "prefill"])
@given(seed=st.integers(0, 2**32 - 1))
def test_round_trip_on_the_host(layout: PackedLayout, seed: int) -> None:
    values = random_fields(layout, seed)
    flat = layout.pack(values)
    assert flat.shape == (layout.size,)
    assert flat.dtype == np.int32
    back = layout.unpack(flat)
    assert back.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value)


def test_round_trip_through_a_jitted_pytree() -> None:
    values = random_fields(PREFILL, 1)
    batch = jax.jit(lambda flat: PrefillBatch(**PREFILL.unpack(flat)))(
        jnp.asarray(PREFILL.pack(values))
    )
    assert isinstance(batch, PrefillBatch)
    for name, value in values.items():
        np.testing.assert_array_equal(getattr(batch, name), value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("slots", np.zeros(4, np.int32), r"slots is int32\(4,\); expected int32\(3,\)"),
        ("grants", np.zeros((3, 5), np.int32), r"grants is int32\(3, 5\)"),
        ("slots", np.zeros(3, np.int64), r"slots is int64\(3,\)"),
        ("slots", np.zeros(3, np.float32), r"slots is float32\(3,\)"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused(name: str, value: np.ndarray, message: str) -> None:
    values = random_fields(DECODE, 0)
    values[name] = value
    with pytest.raises(ValueError, match=message):
        DECODE.pack(values)


def test_a_missing_field_is_refused() -> None:
    values = random_fields(DECODE, 0)
    del values["grants"]
    with pytest.raises(KeyError, match="grants"):
        DECODE.pack(values)
