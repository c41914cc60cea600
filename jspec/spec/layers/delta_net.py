"""A recurrent layer (gated delta net) as host data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jspec.errors import ConfigError
from jspec.spec.cache_entry import CacheEntry, Record, State


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """A gated delta net (Gated DeltaNet, arXiv:2412.06464, as in Qwen3-Next): a recurrent layer.

    Queries, keys and values come from one projection, a causal convolution of conv_size tokens and
    SiLU. Each value head has a state [key_dim, value_dim], a decay and a step size; several share a
    key head.
    """

    num_heads: int  # of values
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4
    window: ClassVar[int | None] = None
    kv_of: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads is {self.num_heads}; expected a multiple of "
                f"linear_num_key_heads {self.num_key_heads}"
            )
        if self.conv_size < 2:
            raise ConfigError(f"linear_conv_kernel_dim is {self.conv_size}; expected at least 2")

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def cache_entry(self) -> CacheEntry:
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        state = (self.num_heads, self.key_dim, self.value_dim)
        return State(
            carried=(
                Record("state", state, ("heads", None, None), "float32"),
                Record("conv", (self.conv_size - 1, self.conv_dim), (None, "heads")),
            ),
            pending_size=keys + values + self.num_heads + self.conv_dim,
        )
