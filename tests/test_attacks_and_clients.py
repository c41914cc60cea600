"""The tables of attacks and clients name what the commands run and what their results have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.attacks import ATTACKS
from benchmarks.clients import calls
from benchmarks.clients.__main__ import NAMES, NPM

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))


def test_each_client_has_calls_and_each_result_is_in_the_table() -> None:
    assert {*calls.CALLS} == {*NAMES} - {*NPM}
    clients = result("clients_cpu.json")["clients"]
    assert {*clients} <= {*NAMES}
    for name, found in clients.items():
        assert found["error"] is None, name
        assert f"| {name} | {found['version']} |" in PAGE


def test_each_attack_held_and_is_in_the_table() -> None:
    attacks = result("attacks_cpu.json")["attacks"]
    assert [*attacks] == [*ATTACKS]
    for name, found in attacks.items():
        assert not found["faults"], name
        assert f"| {name} |" in PAGE
        assert f"| {found['longest_wait_of_another_client']:.1f} s |" in PAGE
