"""The GPU kernels of delta nets, and of attention over wide heads and latents, interpreted.

Every law of tests/layers/test_mixers.py holds with them: NaN in padding, in rows without a request
and in memory that nothing wrote changes no result, over chunks, trees, chains and single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention import gpu_wide, xla
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.tuning import WideTuning
from jspec.pallas_kernels.delta_rule import gpu, gpu_pairs, gpu_states, gpu_tree
from jspec.pallas_kernels.delta_rule.tuning import Tuning
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.ops_gpu import GpuOps
from tests.layers.mixer_rows import Rows
from tests.layers.test_mixers import mixed_of
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.speculative.engines import (
    PLAIN,
    build,
    dial_for,
    make_request,
    serve,
    spec_of,
    tiny_params,
)
from tests.speculative.family_targets import drawn
from tests.speculative.mixer_targets import MIXER_TARGETS

pytestmark = pytest.mark.filterwarnings("ignore:.*Triton.*")


@dataclass(frozen=True, slots=True)
class MixerOps(Ops):
    """XLA, but for the kernels under test: all of GpuOps would also interpret the others."""

    name = "mixers"

    def delta_rule(self, *given: Any, **how: Any) -> Any:
        return GpuOps(interpret=True).delta_rule(*given, **how)

    def attend_latent(self, *given: Any, **how: Any) -> Any:
        return GpuOps(interpret=True).attend_latent(*given, **how)


@pytest.mark.parametrize(
    ("name", "singles"),
    [
        ("delta_net", False),
        pytest.param("delta_net", True, marks=pytest.mark.slow),
        pytest.param("delta_net_short", True, marks=pytest.mark.slow),
        pytest.param("latent", True, marks=pytest.mark.slow),
        pytest.param("latent_full_queries", True, marks=pytest.mark.slow),
    ],
)
def test_any_history_gives_the_definition(name: str, singles: bool) -> None:
    """singles: also steps of one token, another program."""
    rows = Rows(mixed_of(name), seed=2, page_size=4, ops=MixerOps())
    rows.chunk((6, 1, 9))
    rows.verify(7, topk=2)
    if singles:
        rows.verify(1, topk=1)
    rows.restart(1)
    rows.chunk((0, 5, 3))
    rows.verify(7, topk=2, dead=[1])
    if singles:
        rows.verify(1, topk=1)


@pytest.mark.slow
def test_many_nodes_and_several_strips_give_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "choose_tuning", lambda **_: Tuning(strip=2))
    for module in (gpu_pairs, gpu_states):
        monkeypatch.setattr(module, "CHANNELS", 4)
    for module in (gpu, gpu_tree):
        monkeypatch.setattr(module, "FEW_NODES", 1)
    rows = Rows(mixed_of("delta_net"), seed=4, page_size=4, ops=MixerOps())
    rows.chunk((6, 1, 9))
    rows.verify(3, topk=1)
    rows.verify(5, topk=1)
    rows.verify(6, topk=2)  # a size that no other test has compiled as few nodes
    rows.verify(1, topk=1)


@pytest.mark.slow_cases("heads0-5-2-True-True")
@pytest.mark.parametrize(
    ("heads", "queries", "shares", "tree", "sinks"),
    [
        ((4, 2, 24), 5, 2, True, True),
        pytest.param((6, 1, 20), 12, 1, True, False, marks=pytest.mark.slow),  # two tiles
        pytest.param((2, 2, 32), 1, 3, False, False, marks=pytest.mark.slow),
    ],
)
def test_wide_heads_give_what_xla_gives(
    heads: tuple[int, int, int], queries: int, shares: int, tree: bool, sinks: bool
) -> None:
    """Slots that nothing wrote are NaN; the second row has no request."""
    (num_heads, num_kv, width), page, batch = heads, 8, 3
    rng = np.random.default_rng(0)
    prefix = np.asarray([70, 0, 33])
    lens = np.asarray([queries, 0, queries])
    pages_per_row = 12
    pool = np.full((1 + batch * pages_per_row, page, 2 * num_kv, width), np.nan, np.float32)
    table = 1 + rng.permutation(batch * pages_per_row).reshape(batch, -1)
    for row in range(batch):
        for slot in range(prefix[row] + lens[row]):
            pool[table[row, slot // page], slot % page] = rng.normal(size=pool.shape[2:])
    fields: dict[str, Any] = {}
    positions = prefix[:, None] + np.arange(queries)
    if tree:
        sees = np.tril(rng.random((batch, queries, queries)) < 0.5) | np.eye(queries, dtype=bool)
        words = (sees * (1 << np.arange(queries))).sum(axis=-1)
        fields["tail_mask"] = jnp.asarray(words.reshape(-1, 1), jnp.uint32)
        fields["tail_positions"] = jnp.asarray(positions, jnp.int32)
    rows = AttentionMetadata(
        page_table=jnp.asarray(table, jnp.int32),
        prefix_lens=jnp.asarray(prefix, jnp.int32),
        cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lens)), jnp.int32),
        q_positions=jnp.asarray(positions.reshape(-1), jnp.int32),
        **fields,
    )
    q = jnp.asarray(rng.normal(size=(batch * queries, num_heads, width)), jnp.float32)
    how: Any = {"queries_per_row": queries, "scale": 0.2}
    how["sinks"] = jnp.ones(num_heads) if sinks else None
    expected = xla.attend(q, jnp.asarray(pool), rows, window=None, **how)
    items = batch * num_kv * -(-queries * num_heads // num_kv // 64)
    tuning = WideTuning(block=32, programs=shares * items)
    with jax.default_matmul_precision("highest"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_wide, "NUM_SMS", 1)
        found = gpu_wide.attend_rows(
            q, jnp.asarray(pool), rows, tuning=tuning, interpret=True, **how
        )
    live = np.repeat(lens > 0, queries)
    np.testing.assert_allclose(found[live], expected[live], atol=2e-5)
    assert np.isfinite(np.asarray(found)).all()


@pytest.mark.slow
@pytest.mark.exhaustive  # two engines over interpreted kernels; the laws above are of each kernel
@pytest.mark.parametrize(
    ("name", "shape"), [("hybrid", (3, 1, 4)), ("hybrid", (2, 2, 7)), ("latent", (2, 2, 7))]
)
def test_speculative_text_equals_plain_text(name: str, shape: tuple[int, int, int]) -> None:
    target = MIXER_TARGETS[name]
    params = drawn(target)
    how: Any = {"page_size": 16, "target_spec": target, "ops": MixerOps()}
    requests = [
        make_request(
            i, prompt_len=n, seed=i + 70, temperature=i % 2, max_new_tokens=16, ignore_eos=True
        )
        for i, n in enumerate((9, 2))
    ]
    plain = build(PLAIN, params=(params, {}), **how)
    expected = [serve(plain, [request], overlap_depth=0).ids[0] for request in requests]
    engine = build(spec_of(*shape), params=(params, tiny_params()[1]), **how)
    served = serve(engine, requests, dial=dial_for(requests, expected))
    assert list(served.ids) == expected


@needs_cuda_compiler
@pytest.mark.slow
def test_compiles_ahead_of_time_for_an_h200_and_spills_no_register() -> None:
    lines = output_of("tests.pallas_kernels.gpu_delta_compile").splitlines()
    assert len([line for line in lines if line.startswith("compiled")]) == 18
