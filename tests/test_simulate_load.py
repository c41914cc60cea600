"""The simulated card and clients."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate_load import (
    Pattern,
    Simulation,
    draw,
    limits_of,
    main,
    report,
)
from benchmarks.virtual_card import Card
from jspec.spec.indexing import powers_of_two

BUSY = Pattern(name="busy", num=40, clients=16)


def test_costs_lie_between_what_was_measured() -> None:
    card = Card(decode=((1, 5.0), (8, 6.0), (64, 10.0)))
    assert [card.decode_step(rows) for rows in (1, 8, 36, 64)] == [5.0, 6.0, 8.0, 10.0]
    assert card.prefill_step(1) == card.prefill_least
    assert card.prefill_step(1024) == pytest.approx(card.prefill_base + 1024 * card.prefill_token)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_token_is_delivered_and_the_device_never_does_two_things(depth: int) -> None:
    limits = limits_of(overlap_depth=depth)
    simulation = Simulation(limits, Card(), BUSY)
    total = simulation.run()
    jobs, _ = draw(BUSY)
    assert [simulation.seen[str(i)].num_tokens for i in range(BUSY.num)] == [
        job.output_len for job in jobs
    ]
    assert simulation.runner.prompt_tokens == sum(job.prompt_len for job in jobs)
    # But for steps of rows that have ended, which run on after the last event.
    assert simulation.runner.busy_ms <= total + depth * Card().decode_step(BUSY.clients)
    for seen in simulation.seen.values():
        assert seen.first - seen.sent >= Card().prefill_least
        assert min(seen.gaps) >= 0
    assert (depth == 0) == (report(simulation, total)["device_busy"] < 0.97)


def test_close_sizes_and_a_budget_are_seen() -> None:
    def run(**limits: Any) -> dict[str, Any]:
        simulation = Simulation(limits_of(**limits), Card(), BUSY)
        return report(simulation, simulation.run())

    planned = run()
    padded = run(prefill_buckets=powers_of_two(128, 8192))
    hasty = run(prefill_budget=8192)
    assert planned["padding"] < 0.6 * padded["padding"]
    assert planned["tokens_per_second"] > padded["tokens_per_second"]
    assert planned["longest_gap_ms"] < hasty["longest_gap_ms"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    main(["--set", "prefill_budget=1024", "--card", "row=0.1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result == json.loads(capsys.readouterr().out)
    assert (result["prefill_budget"], result["card"]["row"]) == (1024, 0.1)
    assert set(result["patterns"]) == {"64 clients", "12 a second", "one client"}
    with pytest.raises(SystemExit, match="'rows' is unknown; expected one of arrive, "):
        main(["--card", "rows=1"])
    assert dataclasses.asdict(Card())["row"] != 0.1
