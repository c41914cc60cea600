"""Choose the format in which each weight of a model is resident when it is loaded, by the stored
format, the argument, and the formats that the kernels read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jspec.errors import ConfigError
from jspec.models.files.stored.layouts import chosen_layout, stored_formats
from jspec.models.files.tensor_files import open_tensors
from jspec.models.files.w8a8 import (
    STATIC,
    declared_forms,
    quantization_method,
    unscaled,
)
from jspec.models.files.w8a8_weights import StoredW8A8, forms_in, stored_w8a8
from jspec.models.params import ParamPath, ParamSpec, ParamTable, Part
from jspec.pallas_kernels.formats import resident_format
from jspec.spec.weight_format import MXFP4, QUANTIZATIONS, W8A8, Formats, Op, WeightFormat

UNPACKED = "none"  # a value of the argument
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The argument, by name and value, and facts about the model that is loaded."""

    name: str = "quantization"
    value: str | None = None
    bundle: str
    dtype: str
    shards: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """The formats of a checkpoint: of whole products, and of 8-bit weights by path."""

    of_products: dict[Op, WeightFormat]
    of_weights: dict[ParamPath, StoredW8A8]
    method: str | None
    has_static_scales: bool = False


def resident_formats(
    path: Path,
    table: ParamTable,
    wanted: Wanted,
    *,
    has_files: bool = True,  # read headers; otherwise only config.json, for random weights
    canonical: Callable[[str], str] = str,
) -> Formats:
    """Choose the formats of `table`'s weights and log each choice. Raises ConfigError for a method
    that is not the checkpoint's."""
    table = tuple(spec for spec in table if spec.layouts and spec.op is not None)
    read = _read_headers if has_files else _read_config
    stored = read(path, table, shards=wanted.shards, canonical=canonical)
    _check_method(path, wanted, stored)
    if wanted.value == UNPACKED:
        return ()
    made = QUANTIZATIONS.get(wanted.value or "")
    if made is not None and stored.method is None:
        stored = _all_quantized(table, stored, made)
    if stored.has_static_scales:
        log.info(
            "%s: scales of activations (input_scale) are ignored: each token gets its own", path
        )
    found: dict[Op | ParamPath, WeightFormat] = {}
    how = {"bundle": wanted.bundle, "dtype": wanted.dtype}
    shards = {spec.op: wanted.shards // spec.expert_shards for spec in table}  # of one matrix
    for op, format in stored.of_products.items():
        resident, decision = resident_format(format, op, **how, shards=shards[op])
        log.info("%s: %s", path, decision)
        found |= {op: resident} if resident == format else {}
    decisions: Counter[str] = Counter()
    for spec in (spec for spec in table if spec.path in stored.of_weights):
        each = stored.of_weights[spec.path]
        assert spec.op is not None
        resident, decision = resident_format(each.format, spec.op, **how, shards=shards[spec.op])
        if each.problem is not None:
            decision = (
                f"{spec.op.value}: {each.format.name}, unpacked to {wanted.dtype}: {each.problem}"
            )
        elif resident == each.format:
            found[spec.path] = resident
        decisions[decision] += 1
    for decision, count in decisions.items():
        log.info("%s: %s (%d weights)", path, decision, count)
    return tuple(found.items())


def _read_headers(
    path: Path, table: ParamTable, *, shards: int, canonical: Callable[[str], str]
) -> _Stored:
    """Read formats from headers, since a model that was saved again can have unpacked weights."""
    with open_tensors(path, canonical=canonical) as opened:
        tensors = unscaled(opened)
        layout_of = partial(chosen_layout, tensors)
        weights = _w8a8_weights(table, layout_of, forms_in(tensors), shards=shards)
        products = stored_formats(table, layout_of)
        method = quantization_method(path)
        if not weights and not products:
            method = None
        elif method is None:
            first = next(iter(weights.values()), None)
            method = MXFP4.name if first is None else _flag_of(first.format)
        is_static = any(name.rsplit(".", 1)[-1] in STATIC for name in opened.sources)
        return _Stored(products, weights, method, bool(weights) and is_static)


def _read_config(
    path: Path, table: ParamTable, *, shards: int, canonical: Callable[[str], str]
) -> _Stored:
    del canonical
    method = quantization_method(path)

    def layout_of(spec: ParamSpec) -> tuple[Part, ...]:
        layouts = (x for x in spec.layouts if x[0].format and x[0].format.name == method)
        return next(layouts, spec.layouts[0])

    weights = _w8a8_weights(table, layout_of, declared_forms(path), shards=shards)
    return _Stored(stored_formats(table, layout_of), weights, method)


def _w8a8_weights(
    table: ParamTable,
    layout_of: Callable[[ParamSpec], tuple[Part, ...]],
    form_of: Callable[[str], W8A8 | str | None],
    *,
    shards: int,
) -> dict[ParamPath, StoredW8A8]:
    each = (
        (spec.path, stored_w8a8(spec, layout_of(spec), form_of, shards=shards)) for spec in table
    )
    return {path: stored for path, stored in each if stored is not None}


def _check_method(path: Path, wanted: Wanted, stored: _Stored) -> None:
    value, method = wanted.value, stored.method
    if value in (None, UNPACKED, method):
        return
    if method is None:
        if value in QUANTIZATIONS:
            return
        raise ConfigError(
            f"{wanted.name} is {value!r}, but {path} is not quantized; expected "
            f"{' or '.join(map(repr, QUANTIZATIONS))}, which quantizes while loading, or unset"
        )
    found = {_flag_of(each.format) for each in stored.of_weights.values()}
    if found == {value}:
        return
    raise ConfigError(
        f"{wanted.name} is {value!r}, but {path} is quantized by {method!r}; expected that, "
        f"{UNPACKED!r}, or unset"
    )


def _flag_of(format: W8A8) -> str:
    return next(flag for flag, made in QUANTIZATIONS.items() if type(made) is type(format))


def _all_quantized(table: ParamTable, stored: _Stored, format: W8A8) -> _Stored:
    ops = (Op.LINEAR, Op.GATED)
    weights = {
        spec.path: found
        for spec in table
        if spec.op in ops
        and (found := stored_w8a8(spec, spec.layouts[0], lambda _: format, shards=1))
    }
    return _Stored(stored.of_products, weights, _flag_of(format))
