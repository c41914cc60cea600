"""Scratch costs no token: every draft shape can use all tokens that the pool reports."""

from __future__ import annotations

import itertools

import jax
import pytest

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.messages.request import Request
from jspec.spec.model_spec import cache_groups
from tests.scheduler.test_scheduler import Bench, expected_ids, make_request
from tests.support.fake_runner import FakeRunner, random_acceptance
from tests.support.flat_limits import with_limits
from tests.support.limits import limits_for
from tests.support.tiny_models import tiny_target_config

SHAPES = [(0, 1, 1), (3, 1, 4), (2, 2, 4), (3, 8, 100)]
CONTEXT = 64


def limits_of(
    shape: tuple[int, int, int], *, total: int | None = CONTEXT, slots: int = 1, **more: int
) -> ServeLimits:
    """Return the limits of an engine with `max_total_tokens` of `total`."""
    steps, topk, nodes = shape
    speculation = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "d",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }
    args = EngineArgs(
        model_path="m",
        dtype="float32",
        attention_backend="xla",
        **(speculation if steps else {}),  # type: ignore[arg-type]
        context_length=CONTEXT,
        max_total_tokens=total,
        max_running_requests=slots,
        chunked_prefill_size=64,
        **more,  # type: ignore[arg-type]
    )
    return limits_for(
        args,
        cache_groups(tiny_target_config(), name="target"),
        devices=jax.devices()[:1],
    )


def num_tokens(limits: ServeLimits, *requests: Request) -> list[int]:
    """Return the tokens of each request, which are correct, with no page leaked."""
    accepted_at = random_acceptance(0.6, limits.draft_shape.num_steps)
    bench = Bench(limits, FakeRunner(limits, accepted_at=accepted_at))
    bench.submit(*requests)
    bench.run_all()
    stats = bench.scheduler.stats
    assert (stats.num_free_pages, stats.num_leaked_pages) == (stats.num_pages, 0)
    found = []
    for request in requests:
        ids = [i for chunk in bench.chunks[request.request_id] for i in chunk.new_ids]
        assert tuple(ids) == expected_ids(request, len(ids))
        found.append(len(ids))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_of_the_context_gives_every_token(
    shape: tuple[int, int, int], page_size: int
) -> None:
    whole = limits_of(shape, page_size=page_size)
    for (depth, rounds), prompt in itertools.product(((0, 1), (2, 3)), (1, 44, CONTEXT - 1)):
        limits = with_limits(whole, overlap_depth=depth, num_rounds=rounds)
        request = make_request(prompt_len=prompt, max_new_tokens=CONTEXT - prompt)
        assert num_tokens(limits, request) == [CONTEXT - prompt]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_that_share_a_pool_of_one_context_get_every_token(
    shape: tuple[int, int, int], page_size: int
) -> None:
    whole = limits_of(shape, page_size=page_size, slots=3)
    wanted = [10, CONTEXT - 10, 9, 40]
    for depth, rounds in ((0, 1), (2, 3)):
        limits = with_limits(whole, overlap_depth=depth, num_rounds=rounds)
        requests = [
            make_request(f"r{i}", prompt_len=CONTEXT - most, max_new_tokens=most)
            for i, most in enumerate(wanted)
        ]
        assert num_tokens(limits, *requests) == wanted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("total", "page_size"), [(40, 1), (40, 16), (48, 16), (33, 4)])
def test_a_pool_below_the_context_cuts_every_shape_alike(
    shape: tuple[int, int, int], total: int, page_size: int
) -> None:
    request = make_request(prompt_len=20, max_new_tokens=44)
    plain = limits_of((0, 1, 1), total=total, page_size=page_size)
    limits = limits_of(shape, total=total, page_size=page_size)
    assert limits.max_total_tokens == plain.max_total_tokens >= total
    cut = num_tokens(plain, request)
    assert num_tokens(limits, request) == cut
    assert total - 20 < cut[0] < 44


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pool_that_nobody_sized_holds_the_context(shape: tuple[int, int, int]) -> None:
    limits = limits_of(shape, total=None)
    assert num_tokens(limits, make_request(prompt_len=40, max_new_tokens=24)) == [24]
