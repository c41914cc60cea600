"""The packed i32 array of a step: round trips and refused shapes."""

from __future__ import annotations

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import ServeLimits, WindowSpace
from jspec.device.batch import DecodeBatch, PrefillBatch, pack_output
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.transfer import layout_of
from jspec.messages.layout import OutputColumns, PackedLayout, output_columns
from jspec.messages.plan import StepKind
from jspec.messages.step_options import StepOption, StepOptions
from tests.support.fake_limits import small_limits
from tests.support.flat_limits import with_limits

PLAIN_LIMITS = with_limits(small_limits(), vocab_size=90)
WINDOWS = (WindowSpace(window=4, num_pages=32), WindowSpace(window=8, num_pages=32))
LIMITS = with_limits(PLAIN_LIMITS, windows=WINDOWS)


def layout_with(kind: StepKind, *options: StepOption, limits: ServeLimits = LIMITS) -> PackedLayout:
    key = ProgramKey(kind, 3 if kind is StepKind.DECODE else 12, StepOptions(frozenset(options)))
    return layout_of(key, limits)


DECODE, PREFILL = layout_with(StepKind.DECODE), layout_with(StepKind.PREFILL)
SHARING = layout_with(StepKind.DECODE, StepOption.SHARED)
WHOLE = with_limits(LIMITS, has_loras=True)
MASKED = layout_with(StepKind.PREFILL, StepOption.GRAMMAR, limits=WHOLE)


def random_fields(layout: PackedLayout, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-(2**31), 2**31, shape, np.int32) for name, shape in layout.fields}


@pytest.mark.parametrize(
    ("layout", "batch"), [(DECODE, DecodeBatch), (MASKED, PrefillBatch)], ids=["decode", "prefill"]
)
def test_layouts_name_the_fields_of_their_batches(layout: PackedLayout, batch: type) -> None:
    named = list(dict.fromkeys(name.split(".")[0] for name, _ in layout.fields))
    assert named == [field.name for field in fields(batch) if field.name != "shared"]


def test_an_engine_without_windows_sends_nothing_for_them() -> None:
    for kind in (StepKind.DECODE, StepKind.PREFILL):
        windowed, plain = layout_with(kind), layout_with(kind, limits=PLAIN_LIMITS)
        left = tuple(field for field in windowed.fields if field[0] != "window_grants")
        assert plain.fields == left


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


@pytest.mark.parametrize("max_emitted", [1, 4])
def test_outputs_are_read_as_they_were_packed(max_emitted: int) -> None:
    """Also with additional columns."""
    columns = OutputColumns((*output_columns(max_emitted).fields, ("more", (2, 3))))
    rng = np.random.default_rng(0)
    values = {
        name: rng.integers(-(2**31), 2**31, (5, *shape), np.int32) for name, shape in columns.fields
    }
    packed = np.asarray(jax.jit(lambda v: pack_output(columns, v))(values))
    assert packed.shape == (5, columns.width)
    assert columns.width == 1 + max_emitted + 6
    np.testing.assert_array_equal(packed[:, 0], values["num_emitted"])
    for back in (columns.unpack(packed), columns.unpack(packed[None])):
        assert back.keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(back[name].reshape(value.shape), value)
    assert columns.unpack(packed[None])["more"].shape == (1, 5, 2, 3)


@pytest.mark.parametrize("shapes", [{}, {"num_emitted": (2,), "emitted_ids": (2, 3)}])
def test_an_output_that_is_not_as_described_is_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    values = {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=r"expected {'num_emitted': \(\), 'emitted_ids': \(4,\)}"):
        pack_output(output_columns(4), values)
