"""200 random JSON schemas at concurrency 32: valid answers, equal to plain decoding.

It builds three engines: pytest -m exhaustive tests/test_random_schemas.py.
"""

from __future__ import annotations

import pytest

from benchmarks import grammar


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_random_schemas_are_followed_and_speculation_changes_nothing() -> None:
    pytest.importorskip("llguidance")
    found = grammar.main(["--schemas", "200", "--concurrency", "32"])
    assert found["num_ended"] + found["num_cut_by_length"] == 200
    assert found["num_ended"] >= 190
    assert found["num_valid"] == found["num_ended"]
    assert found["num_same_without_drafts"] == 200
    assert found["acceptance_length"] > 1.2
