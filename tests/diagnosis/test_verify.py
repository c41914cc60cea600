"""Replaying prompts: no finding on a healthy engine, faults on broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jspec.cli.diagnosis.prompts import EXAMPLES, Prompt, examples, first_of, read_prompts
from jspec.cli.diagnosis.verify import VerifySettings, checking_arguments, verify
from jspec.cli.main import main
from jspec.cli.verify import text_of
from jspec.errors import ConfigError

SETTINGS = VerifySettings(max_new_tokens=24, temperatures=(0.0, 1.0))
PROMPTS = examples()[:3]


@pytest.mark.slow
@pytest.mark.exhaustive  # the next one verifies as much, and fails if a healthy text would
def test_a_healthy_pair_has_no_fault(arguments: dict[str, Any]) -> None:
    report = verify(arguments, PROMPTS, SETTINGS)
    assert report.num_texts == 6
    assert report.num_faults == 0
    assert report.speculation.num_other == 0
    assert report.speculation.num_tokens > 100
    assert 0 < report.noise < 0.01
    assert text_of(report).splitlines()[-1] == "well: speculation changed no token"
    assert json.loads(json.dumps(report.to_json()))["num_faults"] == 0


@pytest.mark.slow
def test_a_wrong_accept_is_found(arguments: dict[str, Any]) -> None:
    """Simulated acceptance accepts drafts that are not the target's choice."""
    report = verify({**arguments, "simulate_acceptance": 2.0}, PROMPTS, SETTINGS)
    assert report.speculation.faults
    assert not report.plain.faults
    assert max(fault.margin or 0 for fault in report.speculation.faults) > report.tolerance
    assert "FAULT: speculation changed" in text_of(report)


def test_the_plain_engine_drafts_nothing() -> None:
    given = {
        "model_path": "m",
        "speculative_num_steps": 3,
        "simulate_acceptance": 2.0,
        "dtype": "float32",
        "disable_logprobs": True,
    }
    assert checking_arguments(given) == {
        "model_path": "m",
        "dtype": "float32",
        "speculative_algorithm": "NONE",
        "disable_logprobs": False,
    }


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "sampling_params": {"temperature": 0.5}},
        {"messages": [{"role": "user", "content": "b"}]},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "c", "model": "m"}},
        "d",
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_prompts(file)
    assert [(p.number, p.kind) for p in found] == [
        *((1, "prompt"), (3, "messages"), (5, "prompt"), (7, "prompt"))
    ]
    assert found[0].sampling == {"temperature": 0.5}
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\ntwo\n")
    assert [p.given for p in read_prompts(text)] == ["one", "two"]
    text.write_bytes(b"one\n\xe9")
    with pytest.raises(ConfigError, match=r"prompts.txt' is not UTF-8: byte 0xe9 at offset 4"):
        read_prompts(text)
    assert len(examples()) == len(EXAMPLES)
    many = [Prompt(number=i, kind="prompt", given="x") for i in range(10)]
    assert [p.number for p in first_of(many, 3)] == [0, 3, 6]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "expected an object with one of"),
        ('{"prompt": "a", "input_ids": [1]}', "expected an object with one of"),
        ('{"prompt": "a", "sampling_params": 3}', "sampling_params is 3"),
        ("", "is empty"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=why):
        read_prompts(file)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["verify", "--speculative-algorithm", "NONE"], "nothing to compare"),
        (["verify", "--model-path", "."], "nothing to compare"),
        (["verify", "--temperature", "-1"], "temperature is -1"),
        (["verify", "no such file"], "expected a text file"),
        (["verify", "--max-new-tokens", "0"], "expected at least 1"),
        (["verify", "--num-prompts", "0"], "expected at least 1"),
        (["verify", "--output", "no/such/folder/x.json"], "folder that is there"),
        (["verify", "--max-new-token", "3"], "--max-new-tokens"),
        (["doctor", "--speculative-algorithm", "NONE"], "expected one that drafts"),
        (["doctor", "no such file"], "expected a text file"),
    ],
)
def test_what_cannot_be_is_said_before_anything_loads(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert why in capsys.readouterr().err
