"""A step's shared prefixes are correct: the text is the same if they are relied on."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.shared_prefixes import UNIT, SharingLimits
from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.kv_write.api import KVScales
from jspec.pallas_kernels.ops import Ops
from tests.speculative.engines import TARGET, Compiled, build, make_request, plain_ids, spec_of
from tests.speculative.test_prefix_cache import Session, ids_of
from tests.support.flat_limits import with_limits

PAGE_SIZE = 4
SHARING = SharingLimits(rows_a_pack=2, pays_from=1, least_rows=1)


@dataclasses.dataclass(frozen=True, slots=True)
class LeadersPages(Ops):
    """Reads shared prefixes in their leader's pages alone, wherever a row's own table points."""

    def attend(
        self,
        q: jax.Array,
        k_new: jax.Array | None,
        v_new: jax.Array | None,
        kv_pages: jax.Array,
        rows: AttentionMetadata,
        call: AttentionCall,
        sinks: jax.Array | None = None,
        scales: KVScales | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        if rows.shared is not None:
            first = jnp.arange(rows.page_table.shape[1]) * kv_pages.shape[1]
            theirs = jnp.take(rows.page_table, rows.shared.leaders, axis=0)
            is_shared = first < rows.shared.num_keys[:, None]
            table = jnp.where(is_shared, theirs, rows.page_table)
            rows = dataclasses.replace(rows, page_table=table)
        return Ops.attend(self, q, k_new, v_new, kv_pages, rows, call, sinks, scales)


@cache
def engine(kind: str) -> Compiled:
    shape = {"chain": (2, 1, 3), "tree": (2, 2, 5)}[kind]
    ops, variants = LeadersPages(), (SAMPLING,)
    spec = spec_of(*shape)
    return build(spec, page_size=PAGE_SIZE, dial=False, variants=variants, ops=ops, sharing=SHARING)


def prompts_after(prefixes: list[int], *, seed: int) -> list[Request]:
    """Request i starts with 132 tokens of prefixes[i], 3 of which are in every prefix."""
    rng = np.random.default_rng(seed)
    requests = []
    for i, prefix in enumerate(prefixes):
        common = np.random.default_rng(1000 + prefix).integers(0, TARGET.vocab_size, UNIT + 4)
        own = rng.integers(0, TARGET.vocab_size, int(rng.integers(1, 20)))
        prompt = tuple(int(x) for x in (1, 2, 3, *common, *own))
        request = make_request(
            i, prompt_len=1, seed=seed * 100 + i, max_new_tokens=int(rng.integers(4, 24)),
            temperature=float(i % 2),
        )  # fmt: skip
        requests.append(dataclasses.replace(request, prompt_ids=prompt))
    return requests


@pytest.mark.parametrize(
    ("kind", "retract_after"),
    [
        pytest.param("chain", None, marks=pytest.mark.slow),
        ("chain", 9),
        pytest.param("tree", 9, marks=pytest.mark.slow),
    ],
)
def test_what_rows_share_is_in_their_leaders_pages(kind: str, retract_after: int | None) -> None:
    session = Session(engine(kind), overlap_depth=2)
    session.serve(prompts_after([0, 1], seed=1))  # their pages are cached from here on
    requests = prompts_after([0, 0, 1, 2, 0, 1, 0], seed=2)
    chunks = session.serve(requests, retract_after=retract_after)
    assert [ids_of(of_one) for of_one in chunks] == [plain_ids(r) for r in requests]
    told = [plan.shared for plan, _ in session.view.steps if plan.shared]
    assert max(len({s.leader for s in shared if s.num_keys}) for shared in told) == 2
    assert session.scheduler.stats.num_shared_keys >= UNIT * len(told)


def test_little_to_gain_is_not_told() -> None:
    compiled = engine("chain")
    sharing = dataclasses.replace(SHARING, pays_from=5 * UNIT)
    limits = with_limits(compiled.limits, sharing=sharing)
    session = Session(dataclasses.replace(compiled, limits=limits))
    session.serve(prompts_after([0], seed=1))
    requests = prompts_after([0, 0, 0], seed=3)
    chunks = session.serve(requests)
    assert [ids_of(of_one) for of_one in chunks] == [plain_ids(r) for r in requests]
    assert not any(plan.shared for plan, _ in session.view.steps)
    assert session.scheduler.stats.num_shared_keys == 0
