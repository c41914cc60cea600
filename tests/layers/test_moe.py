"""MoE layers against numpy in float64, expert by expert and token by token."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspec.device.parallel import Parallel
from jspec.layers.linear import Shard
from jspec.layers.moe import moe, route
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.ops import Ops
from jspec.spec.axes import MODEL
from jspec.spec.layers.feed_forward import DenseSpec, Gate, MoESpec, Routing

E, X, INNER, TOP = 6, 5, 4, 2


def drawn(*, bias: bool, num_experts: int = X) -> dict[str, Any]:
    """Draw params in float64; gate columns, then up columns."""
    rng, X = np.random.default_rng(0), num_experts
    router = {"kernel": rng.normal(size=(E, X)), "router_bias": rng.normal(size=X)}
    experts = {
        "gate_up": rng.normal(size=(X, E, 2 * INNER)) * 2,
        "down": rng.normal(size=(X, INNER, E)),
    }
    if bias:
        router["bias"] = rng.normal(size=X)
        experts["gate_up_bias"] = rng.normal(size=(X, 2 * INNER)) * 4
        experts["down_bias"] = rng.normal(size=(X, E))
    return {"router": router, "experts": experts}


def softmax(x: Any) -> Any:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def expected_route(logits: Any, routing: Routing, router_bias: Any) -> dict[int, float]:
    """Return the weight of each chosen expert of one token. router_bias: the router bias
    (sigmoid)."""
    if routing in (Routing.SIGMOID_THEN_TOP, Routing.SIGMOID_THEN_TOP_NORMALIZED):
        scores = 1 / (1 + np.exp(-logits))
        chosen = np.argsort(-(scores + router_bias))[:TOP]
        total = scores[chosen].sum() if routing is Routing.SIGMOID_THEN_TOP_NORMALIZED else 1.0
        return dict(zip(chosen.tolist(), (scores[chosen] / total).tolist(), strict=True))
    chosen = np.argsort(-logits)[:TOP]
    over_all, over_chosen = softmax(logits)[chosen], softmax(logits[chosen])
    if routing is Routing.SOFTMAX_THEN_TOP:
        return dict(zip(chosen.tolist(), over_all.tolist(), strict=True))
    return dict(zip(chosen.tolist(), over_chosen.tolist(), strict=True))


def expected_gated(gate: Any, up: Any, limit: float | None) -> Any:
    silu = gate / (1 + np.exp(-gate))
    return silu * up if limit is None else np.minimum(silu, limit) * np.clip(up, -limit, limit)


def expected_expert(x: Any, experts: dict[str, Any], index: int, gate_kind: Gate) -> Any:
    both = x @ experts["gate_up"][index]
    if "gate_up_bias" in experts:
        both = both + experts["gate_up_bias"][index]
    gate, up = both[:INNER], both[INNER:]
    if gate_kind is Gate.CLAMPED:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    else:
        limit = 7.0 if gate_kind is Gate.SILU_WITHIN_7 else None
        inner = expected_gated(gate, up, limit)
    out = inner @ experts["down"][index]
    return out + experts["down_bias"][index] if "down_bias" in experts else out


def expected_moe(x: Any, params: dict[str, Any], spec: MoESpec) -> Any:
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        logits = token @ params["router"]["kernel"] + params["router"].get("bias", 0)
        router_bias = params["router"]["router_bias"]
        for index, weight in expected_route(logits, spec.routing, router_bias).items():
            out[t] += weight * expected_expert(token, params["experts"], index, spec.gate)
    if spec.shared is not None:
        shared = params["shared"]
        gate, up = np.split(x @ shared["gate_up"]["kernel"], 2, axis=-1)
        out += expected_gated(gate, up, spec.shared.limit) @ shared["down"]["kernel"]
    return out


def tokens(count: int) -> Any:
    """Draw tokens; the first two are large, so that a clamped gate clamps."""
    x = np.random.default_rng(1).normal(size=(count, E))
    x[:2] *= 4
    return x


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("routing", Routing, ids=lambda r: r.name)
@pytest.mark.parametrize(("gate", "bias"), [(Gate.SILU, False), (Gate.CLAMPED, True)])
def test_a_mixture_is_the_weighted_sum_of_its_experts(
    routing: Routing, gate: Gate, bias: bool, num_tokens: int
) -> None:
    spec = MoESpec(num_experts=X, top_k=TOP, inner=INNER, routing=routing, gate=gate, bias=bias)
    params, x = drawn(bias=bias), tokens(num_tokens)
    held, given = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, x))
    out = moe(held, given, spec=spec, shard=Shard(), ops=Ops())
    np.testing.assert_allclose(out, expected_moe(x, params, spec), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("limit", [None, 2.0])
def test_every_token_runs_through_the_shared_expert(limit: float | None) -> None:
    """The other experts are clamped where their values are large."""
    spec = MoESpec(
        num_experts=X,
        top_k=TOP,
        inner=INNER,
        routing=Routing.SIGMOID_THEN_TOP_NORMALIZED,
        gate=Gate.SILU_WITHIN_7,
        shared=DenseSpec(inner=3, limit=limit),
    )
    rng = np.random.default_rng(2)
    shared = {"gate_up": {"kernel": rng.normal(size=(E, 6))}}
    shared["down"] = {"kernel": rng.normal(size=(3, E))}
    params, x = {**drawn(bias=False), "shared": shared}, tokens(9)
    held, given = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, x))
    out = moe(held, given, spec=spec, shard=Shard(), ops=Ops())
    expected = expected_moe(x, params, spec)
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-4)
    unclamped = dataclasses.replace(spec, gate=Gate.SILU, shared=DenseSpec(inner=3))
    apart = np.abs(expected_moe(x, params, unclamped) - expected).max(axis=-1)
    assert (apart[:2] > 1e-2).all()


def test_weights_are_float32_and_the_best_expert_comes_first() -> None:
    spec = MoESpec(num_experts=3, top_k=3, inner=INNER)
    kernel = jnp.asarray([[1.0, 3.0, 2.0]], jnp.bfloat16)
    ids, weights = route({"kernel": kernel}, jnp.ones((1, 1), jnp.bfloat16), spec=spec)
    assert ids.tolist() == [[1, 2, 0]]
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights[0], softmax(np.array([3.0, 2.0, 1.0])), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "shares"),
    [
        (Parallel(tensor=2), False),
        (Parallel(expert=2, tensor=2), False),
        (Parallel(data=2, expert=2), False),
        (Parallel(data=2, tensor=2), True),
        (Parallel(data=2, expert=2), True),
        (Parallel(data=4), True),
    ],
)
def test_shards_add_up_and_a_bias_is_added_once(parallel: Parallel, shares: bool) -> None:
    """Shards of the inner columns and of the experts. shares: ranks do not have all experts."""
    data = parallel.data if shares else 1
    spec = MoESpec(
        num_experts=4,
        top_k=TOP,
        inner=INNER,
        gate=Gate.CLAMPED,
        bias=True,
        shards=data * parallel.expert,
        data_shards=data,
    )
    params, x = drawn(bias=True, num_experts=4), tokens(8)
    held, given = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, x))
    halves = np.arange(2 * INNER).reshape(2, parallel.tensor, -1)
    order = halves.swapaxes(0, 1).reshape(-1)
    for name in ("gate_up", "gate_up_bias"):
        held["experts"][name] = held["experts"][name][..., order]
    first = ("data", "expert") if shares else "expert"
    specs = {
        "router": dict.fromkeys(("kernel", "bias", "router_bias"), PartitionSpec()),
        "experts": {
            "gate_up": PartitionSpec(first, None, "tensor"),
            "gate_up_bias": PartitionSpec(first, "tensor"),
            "down": PartitionSpec(first, "tensor", None),
            "down_bias": PartitionSpec(),
        },
    }

    def on_shard(params: Any, x: jax.Array) -> jax.Array:
        shard = Shard(parallel.model, MODEL)
        return moe(params, x, spec=spec, shard=shard, ops=Ops())[None]

    found = jax.jit(
        jax.shard_map(
            on_shard,
            mesh=parallel.mesh(jax.devices("cpu")[: parallel.data * parallel.model]),
            in_specs=(specs, PartitionSpec("data")),
            out_specs=PartitionSpec(MODEL, "data"),
            check_vma=False,
        )
    )(held, given)
    expected = expected_moe(x, params, spec)
    for each in found:
        np.testing.assert_array_equal(each, found[0])
        np.testing.assert_allclose(each, expected, rtol=2e-4, atol=2e-4)


def test_no_product_of_one_token_and_one_column() -> None:
    """XLA for GPUs cannot compile one, as the gate of a shared expert would be."""
    params = drawn(bias=False) | {
        "shared": {"gate_up": {"kernel": np.ones((E, 8))}, "down": {"kernel": np.ones((4, E))}},
        "shared_gate": {"kernel": np.ones((E, 1))},
    }
    spec = MoESpec(
        num_experts=X, top_k=TOP, inner=INNER, shared=DenseSpec(inner=4), shared_gate=True
    )
    run = partial(moe, spec=spec, shard=Shard(), ops=OPS["xla"])
    equations = jax.make_jaxpr(run)(params, jnp.ones((1, E))).jaxpr.eqns
    products = [x.outvars[0].aval for x in equations if x.primitive.name == "dot_general"]
    assert products
    assert all(x.size > 1 for x in products)
