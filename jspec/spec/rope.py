"""Rotary position embedding as data: its base and its scaling for longer contexts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """YaRN's scaling (Peng et al., 2023) of frequencies by RopeConfig.factor: none for pairs that
    rotate more than `beta_fast` times over original_max_position, all below `beta_slow`, between a
    ramp."""

    attention_factor: float  # factor of cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round the ramp's ends to whole pairs
    # DeepSeek's keys, which determine attention_factor; 0: absent. The second also scales the
    # scores of latent attention (models/families/latent/deepseek_v3.py).
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Factor of queries at position p: 1 + beta ln(1 + floor(p / period)), as in Llama 4."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `factor` > 1 without `yarn` or `is_linear` is Llama 3.1's scaling."""

    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    yarn: YarnConfig | None = None
    is_linear: bool = False  # all frequencies are divided by the factor
    # Share of the pairs that rotate, the fastest ones (Gemma 4's p-RoPE).
    turned: float = 1.0
