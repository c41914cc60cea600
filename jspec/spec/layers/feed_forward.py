"""The feed-forward part of a layer as host data: a gated MLP or a mixture of experts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jspec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A gated MLP, silu(gate) * up (SwiGLU), or with GELU (GeGLU)."""

    inner: int  # intermediate_size
    bias: bool = False
    gelu: bool = False  # its approximation by tanh
    limit: float | None = None  # clamps silu(gate) from above and up to [-limit, limit]


class Routing(enum.Enum):
    """The weights of the chosen experts from a router's logits."""

    SOFTMAX_THEN_TOP = "softmax over all experts, then the top k as they are"
    SOFTMAX_THEN_TOP_NORMALIZED = "softmax over all experts, then the top k, summing to one"
    TOP_THEN_SOFTMAX = "the top k logits, softmax over those"
    SIGMOID_THEN_TOP = "sigmoid of each; the top k of that plus a bias, as they are without it"
    SIGMOID_THEN_TOP_NORMALIZED = "the same, summing to one"


class Gate(enum.Enum):
    """An expert's activation of its gate and up projections."""

    SILU = "silu(gate) * up"
    SILU_WITHIN_7 = "silu(gate), at most 7, times up within 7"
    GELU = "gelu(gate), by its approximation by tanh, times up"
    CLAMPED = "gpt-oss: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within 7"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts (MoE), gated MLPs: each token runs through top_k of num_experts."""

    num_experts: int
    top_k: int
    inner: int  # moe_intermediate_size
    routing: Routing = Routing.SOFTMAX_THEN_TOP_NORMALIZED
    gate: Gate = Gate.SILU
    bias: bool = False  # in router and experts
    weight_scale: float = 1.0  # factor of the chosen experts' weights
    shared: DenseSpec | None = None  # one more MLP for every token, added to the experts' output
    shared_gate: bool = False  # that MLP's output times the sigmoid of one product with the token
    num_groups: int = 1  # equal groups of neighboring experts
    top_groups: int = 1  # number of best groups among whose experts the top k are chosen
    shards: int = 1  # of whole experts; `expert_shards.py` sets this and data_shards
    data_shards: int = 1  # data ranks that share the experts, each with some of the shards
    # Physical experts if a map places them; None: the experts are in their order.
    num_placed: int | None = None

    @property
    def num_physical(self) -> int:
        """The number of experts on all devices of a copy of the MoE, replicas included."""
        return self.num_experts if self.num_placed is None else self.num_placed

    @property
    def has_ranked_router(self) -> bool:
        """True if all experts compete and only the weights of a sigmoid are scaled."""
        is_grouped = self.top_groups != self.num_groups
        return not is_grouped and (self.has_router_bias or self.weight_scale == 1.0)

    @property
    def has_router_bias(self) -> bool:
        """True if a router bias takes part in the choice of experts but not in their weights."""
        return self.routing in (Routing.SIGMOID_THEN_TOP, Routing.SIGMOID_THEN_TOP_NORMALIZED)

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.top_k}; expected 1 to {self.num_experts}, the "
                f"number of experts"
            )
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(
                f"n_group is {self.num_groups} and topk_group {self.top_groups}; expected a "
                f"divisor of {self.num_experts}, the number of experts, and at most as many"
            )
        if self.top_k > (among := self.num_experts // self.num_groups * self.top_groups):
            raise ConfigError(
                f"num_experts_per_tok is {self.top_k}; expected at most {among}, the experts of "
                f"topk_group {self.top_groups} of n_group {self.num_groups} groups"
            )


FeedForward = DenseSpec | MoESpec
