"""Draft trees over HTTP: every verification's is returned, and the rest of the answer is the
same."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PARAMS = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 4}


def generate(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/generate", json={"text": "def fib(", "sampling_params": PARAMS, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(answer: dict[str, Any]) -> None:
    """Check that the trees and the output agree."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    trees = meta["draft_trees"]
    assert [tree["step"] for tree in trees] == list(range(1, meta["spec_verify_ct"] + 1))
    for tree, later in zip(trees, [*trees[1:], None], strict=True):
        first, end = tree["first"], len(ids) if later is None else later["first"]
        assert tree["ids"][0] == ids[first - 1]  # the root was emitted before
        assert tree["parents"][0] == -1
        assert all(0 <= above < node for node, above in enumerate(tree["parents"]) if node)
        accepted = [tree["ids"][node] for node in tree["accepted"]]
        assert ids[first:end][: len(accepted)] == accepted[: end - first]
        assert [tree["parents"][node] for node in tree["accepted"]] == [0, *tree["accepted"]][
            : len(accepted)
        ]
        if later is not None:
            assert end - first == len(accepted) + 1
    assert sum(len(tree["ids"]) - 1 for tree in trees) == meta["spec_num_proposed_drafts"]
    assert any(tree["accepted"] for tree in trees)


def test_every_step_tells_its_tree_and_the_text_is_the_same(client: httpx.Client) -> None:
    told, plain = generate(client, return_draft_trees=True), generate(client)
    assert told["output_ids"] == plain["output_ids"]
    assert "draft_trees" not in plain["meta_info"]
    assert "texts" not in told["meta_info"]["draft_trees"][0]
    check(told)


@pytest.mark.parametrize("named", [False, True])
def test_a_stream_tells_them_as_they_come(client: httpx.Client, *, named: bool) -> None:
    body = {"text": "def fib(", "sampling_params": PARAMS, "stream": True}
    asked = {"return_draft_trees": True, "return_spec_tokens": named}
    lines = client.post("/generate", json={**body, **asked}).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
    check(events[-1])
    assert any("draft_trees" in event["meta_info"] for event in events[:-1])
    for tree in events[-1]["meta_info"]["draft_trees"]:
        assert len(tree.get("texts", ())) == named * len(tree["ids"])


def test_rows_that_do_not_ask_are_told_nothing(client: httpx.Client) -> None:
    alone = generate(client)
    body = {"text": ["def fib(", "def fib("], "return_draft_trees": [True, False]}
    answer = client.post("/generate", json={**body, "sampling_params": PARAMS})
    told, other = answer.json()
    check(told)
    assert "draft_trees" not in other["meta_info"]
    assert other["output_ids"] == told["output_ids"] == alone["output_ids"]
