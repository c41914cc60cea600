"""Rotary position embedding as data: its base and how a longer context rescales it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """How YaRN (Peng et al., 2023) slows frequencies by RopeConfig.factor.

    Pairs that turn more than `beta_fast` times over original_max_position keep their frequency,
    those that turn less than `beta_slow` times are slowed by the factor, between is a ramp.
    truncate: the ramp's ends are whole pairs. attention_factor: cos and sin are multiplied by it.
    """

    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `factor` > 1 without `yarn` is Llama 3.1's scaling; low_freq_factor and
    high_freq_factor are that one's."""

    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    yarn: YarnConfig | None = None
