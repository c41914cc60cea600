"""RoPE in configuration files: `rope_theta`, `rope_scaling` (transformers 4), `rope_parameters` (5,
with theta in it). A new kind needs a function here, its entry in KINDS, and layers/rope."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields
from jspec.spec.rope import RopeConfig, YarnConfig

log = logging.getLogger(__name__)

DEFAULT_THETA = 10000.0
TABLES = ("rope_parameters", "rope_scaling")


def read_rope(fields: Fields) -> RopeConfig:
    """Read one RoPE for all layers from all keys about it.

    A non-empty `rope_scaling` replaces `rope_parameters`. Raises ConfigError for an unsupported
    kind, CheckpointError for a contradiction.
    """
    merged = _merged(fields)
    kind = merged.get("rope_type") or "default"
    nested = [name for name, value in merged.values.items() if isinstance(value, dict)]
    if nested or not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f"{fields.path}: rope type is {shown(nested or kind)}; expected "
            f"{' or '.join(repr(name) for name in KINDS)}, one for all layers"
        )
    merged.refuse("partial_rotary_factor", allowed=(1, 1.0), why="RoPE rotates whole heads here")
    return KINDS[kind](merged)


def _merged(fields: Fields) -> Fields:
    """Return one table: rope_theta, rope_type, and the parameters of that type."""
    tables = {name: _typed(fields.table(name), name) for name in TABLES}
    ours, older = tables["rope_parameters"], tables["rope_scaling"]
    if ours.get("rope_type") == "default" and older.get("rope_type"):
        ours = {name: value for name, value in ours.items() if name != "rope_type"}
    for name in ours.keys() & older.keys():
        if ours[name] != older[name]:
            raise CheckpointError(
                f"{fields.path}: {name} is {shown(ours[name])} in rope_parameters and "
                f"{shown(older[name])} in rope_scaling; expected one value"
            )
    merged = {"rope_theta": fields.get("rope_theta"), **(older or ours)}
    dropped = {name: value for name, value in ours.items() if merged.get(name) != value}
    if dropped:
        log.warning(
            "%s: rope_parameters has %s, which is ignored as in transformers: rope_scaling "
            "replaces it, and theta is %s",
            fields.path,
            shown(dropped),
            merged["rope_theta"] or DEFAULT_THETA,
        )
    _add_length(fields, merged)
    return Fields(fields.path, merged)


def _add_length(fields: Fields, merged: dict[str, Any]) -> None:
    """Add the context length before scaling, which some files have outside the tables or omit."""
    name = "original_max_position_embeddings"
    beside = fields.get(name)
    if beside is None:
        merged.setdefault(name, fields.get("max_position_embeddings"))
    elif merged.setdefault(name, beside) != beside:
        raise CheckpointError(
            f"{fields.path}: {name} is {shown(merged[name])} for RoPE and {shown(beside)} "
            "outside; expected one value"
        )


def _typed(table: Fields, name: str) -> dict[str, Any]:
    values = {key: value for key, value in table.values.items() if value is not None}
    old = values.pop("type", None)
    if old is not None and values.setdefault("rope_type", old) != old:
        raise CheckpointError(
            f"{table.path}: rope_type is {shown(values['rope_type'])} and type is {shown(old)} in "
            f"{name}; expected one of them, or one value"
        )
    return values


def _default(merged: Fields) -> RopeConfig:
    return RopeConfig(theta=merged.number("rope_theta", DEFAULT_THETA))


def _factor(merged: Fields) -> float:
    factor = merged.number("factor")
    if factor < 1.0:
        raise ConfigError(f"{merged.path}: rope factor is {factor}; expected at least 1")
    return factor


def _linear(merged: Fields) -> RopeConfig:
    theta, factor = merged.number("rope_theta", DEFAULT_THETA), _factor(merged)
    return RopeConfig(theta=theta, factor=factor, is_linear=True)


def _dynamic(merged: Fields) -> RopeConfig:
    """Read a scaling that changes nothing up to max_position_embeddings, the longest context."""
    _factor(merged)
    return _default(merged)


def _llama3(merged: Fields) -> RopeConfig:
    factor = _factor(merged)
    low, high = merged.number("low_freq_factor"), merged.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"{merged.path}: low_freq_factor is {low} and high_freq_factor is {high}; expected "
            "the second above the first"
        )
    return RopeConfig(
        theta=merged.number("rope_theta", DEFAULT_THETA),
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=merged.integer("original_max_position_embeddings"),
    )


def _yarn(merged: Fields) -> RopeConfig:
    theta, factor = merged.number("rope_theta", DEFAULT_THETA), _factor(merged)
    fast, slow = merged.number("beta_fast", 32.0), merged.number("beta_slow", 1.0)
    if fast < slow:
        raise CheckpointError(
            f"{merged.path}: beta_fast is {fast} and beta_slow is {slow}; expected the first "
            "not below the second"
        )
    if theta <= 1.0:
        raise CheckpointError(f"{merged.path}: rope_theta is {theta}; expected above 1 for YaRN")
    return RopeConfig(
        theta=theta,
        factor=factor,
        original_max_position=merged.integer("original_max_position_embeddings"),
        yarn=YarnConfig(
            attention_factor=merged.number("attention_factor", _attention_factor(merged, factor)),
            beta_fast=fast,
            beta_slow=slow,
            truncate=merged.flag("truncate", True),
            mscale=merged.number("mscale") if merged.get("mscale") else 0.0,
            mscale_all_dim=merged.number("mscale_all_dim") if merged.get("mscale_all_dim") else 0.0,
        ),
    )


def _attention_factor(merged: Fields, factor: float) -> float:
    """Return 0.1 ln(factor) + 1; with both mscales, the ratio of their factors, as in DeepSeek."""
    if not merged.get("mscale") or not merged.get("mscale_all_dim"):
        return yarn_mscale(factor, 1.0)
    first, second = (
        yarn_mscale(factor, merged.number(name)) for name in ("mscale", "mscale_all_dim")
    )
    return first / second


def yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """Return transformers 4's rope_theta and rope_scaling, which `read_rope` can read."""
    scaling: dict[str, Any] | None = None
    if rope.yarn is not None:
        scaling = {
            "rope_type": "yarn",
            "factor": rope.factor,
            "attention_factor": rope.yarn.attention_factor,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "truncate": rope.yarn.truncate,
            "original_max_position_embeddings": rope.original_max_position,
        }
        mscales = {"mscale": rope.yarn.mscale, "mscale_all_dim": rope.yarn.mscale_all_dim}
        scaling |= {name: value for name, value in mscales.items() if value}
    elif rope.is_linear:
        scaling = {"rope_type": "linear", "factor": rope.factor}
    elif rope.factor > 1.0:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


KINDS: dict[str, Callable[[Fields], RopeConfig]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
