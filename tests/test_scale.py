"""The simulation of many replicas."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.scale import TOKENS_A_STEP, Setting, Simulation, quantiles, settings
from benchmarks.virtual_card import Card

SMALL = Setting(replicas=4, seconds=2.0, conversations=40)


def test_requests_are_answered_at_their_rate() -> None:
    found = Simulation(SMALL, Card()).run()
    expected = SMALL.replicas * SMALL.rate * SMALL.answer
    assert 0.7 * expected < found["tokens_per_second"] < 1.1 * expected
    steps = Card()
    assert found["gap_ms"]["p50"] >= steps.decode_step(1)
    # A prompt that is not cached at all is computed in one step, and waits for others.
    assert found["first_token_ms"]["p50"] >= steps.prefill_least + steps.arrive + steps.deliver
    assert found["moved"] == 0


def test_a_router_that_knows_prefixes_finds_more_of_them() -> None:
    by_prefix = Simulation(SMALL, Card()).run()
    by_load = Simulation(replace(SMALL, by_prefix=False), Card()).run()
    forgetful = Simulation(replace(SMALL, most_blocks=100), Card()).run()
    assert by_prefix["hit_rate"] > 1.3 * max(by_load["hit_rate"], forgetful["hit_rate"])
    assert by_prefix["first_token_ms"]["p50"] < by_load["first_token_ms"]["p50"]


def test_streams_of_a_lost_replica_go_on() -> None:
    simulation = Simulation(replace(SMALL, lost=1, restart=0.5, rate=20.0), Card())
    found = simulation.run()
    assert found["moved"] > 0
    assert found["pause_ms"]["most"] < 500
    assert all(each.is_alive for each in simulation.replicas)
    everything = Simulation(replace(SMALL, lost=4, restart=0.5), Card()).run()
    assert everything["pause_ms"]["p50"] > 500  # until a replica is back


def test_replicas_that_only_decode_have_even_gaps() -> None:
    long = replace(SMALL, question=2048, rate=6.0, follows=0.0)
    mixed, apart = (
        Simulation(replace(long, prefill_share=share), Card()).run() for share in (0.0, 0.5)
    )
    assert apart["gap_ms"]["p99"] < mixed["gap_ms"]["p99"] / 3
    assert apart["tokens_per_second"] > 0.8 * mixed["tokens_per_second"]


def test_the_settings_and_quantiles() -> None:
    found = settings([1, 64], 1.0)
    assert {each.replicas for each in found} == {1, 8, 64}
    assert max(each.lost for each in found) == 8
    assert quantiles({1.0: 98, 5.0: 2}) == {"p50": 1.0, "p99": 5.0, "most": 5.0}
    assert quantiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "most": 3.0}
    assert quantiles([]) is None
    assert TOKENS_A_STEP > 1
