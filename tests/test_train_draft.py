"""`jspec train-draft` as a command: the page's commands, a killed run, refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec import Engine
from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.cli.main import main
from jspec.cli.train_draft import DEFAULTS, job_of, make_parser, set_defaults
from jspec.engine.weights.loading import BUNDLED
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.heads.eagle1 import check_eagle1, load_eagle1_config
from jspec.models.heads.mtp import check_mtp, load_mtp_config
from tests.support.tiny_models import write_tiny_pair

PAGE = Path(__file__).parent.parent / "docs" / "training.md"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TINY = (
    *("--num-steps", "4", "--batch-size", "4", "--length", "32", "--num-depths", "3"),
    *("--log-every", "2", "--eval-every", "4", "--checkpoint-every", "1", "--export-dtype"),
    *("float32", "--dtype", "float32", "--serve-prompts", "2", "--devices", "1"),
)
HEADS = {
    "EAGLE3": ("--aux-layer-ids", "0", "1", "2"),
    "EAGLE": ("--own-samples", "4"),
    "NEXTN": (),
    "DFLASH": ("--aux-layer-ids", "1", "2", "--num-layers", "1"),
    "PEAGLE": ("--aux-layer-ids", "0", "1", "2", "--num-layers", "1"),
}


def write_target(folder: Path) -> None:
    write_tiny_pair(folder)
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    chats = [
        [
            {"role": "user", "content": f"{i} and {i}?"},
            {"role": "assistant", "content": f"{i}, {i}; that is {2 * i}"},
        ]
        for i in range(24)
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (folder / "chats.jsonl").write_text("\n".join(lines))


def commands(folder: Path) -> list[list[str]]:
    """Return the page's jspec commands with this test's paths."""
    found = re.findall(r"^jspec (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = {
        "MODEL_DIR": str(folder / "target"),
        "chats.jsonl": str(folder / "chats.jsonl"),
        "runs/head": str(folder / "out"),
        "runs/head/head": str(folder / "out" / "head"),
    }
    return [[names.get(word, word) for word in shlex.split(line)] for line in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(a, marks=() if a == "EAGLE3" else pytest.mark.exhaustive) for a in HEADS],
)
def test_the_pages_commands_lead_to_a_head_that_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    named = tmp_path / "a name"
    named.mkdir()
    write_target(named)
    train, serve = commands(named)
    more = ["--algorithm", algorithm, *TINY, *HEADS[algorithm]]
    assert main([*train, *more]) == 0
    shown = capsys.readouterr().out
    assert "held_out_served_T0" in shown
    assert "tokens/s" in shown
    printed = shlex.split(shown.strip().splitlines()[-1])
    if algorithm == "EAGLE3":
        assert printed[1:] == serve
    parser = FlagParser(prog="jspec serve", allow_abbrev=False)
    add_flags(parser)
    _, settings = parse_flags(parser, printed[2:])
    small: dict[str, Any] = {"dtype": "float32", "max_running_requests": 2, "max_total_tokens": 512}
    asked = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    with Engine(**{**settings.engine, **small}) as engine:
        drafted = engine.generate("1 and 1?", asked)
    with Engine(model_path=str(named / "target"), **small) as engine:
        plain = engine.generate("1 and 1?", asked)
    assert drafted["output_ids"] == plain["output_ids"]
    assert drafted["meta_info"]["spec_verify_ct"] > 0


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/training/test_loop.py has an unbroken run and a resumed one
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    write_target(tmp_path)

    def words(out: str, *more: str) -> list[str]:
        data = str(tmp_path / "chats.jsonl")
        model = str(tmp_path / "target")
        told = ["train-draft", "--model-path", model, "--data", data, "--out", str(tmp_path / out)]
        steps = ["--num-steps", "60", "--serve-prompts", "0", "--eval-every", "7"]
        return [*told, "--algorithm", "EAGLE", *TINY, *steps, "--checkpoint-every", "1", *more]

    assert main(words("whole")) == 0
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen(
        [sys.executable, "-m", "jspec.cli.main", *words("cut")], env=environment
    )
    checkpoints = tmp_path / "cut" / "checkpoints"
    deadline = time.monotonic() + 200
    while child.poll() is None and time.monotonic() < deadline:
        saved = [path.name for path in checkpoints.glob("*") if path.name.isdigit()]
        if any(int(name) >= 5 for name in saved):
            os.kill(child.pid, signal.SIGKILL)
        time.sleep(0.01)
    assert child.wait() == -signal.SIGKILL
    assert not (tmp_path / "cut" / "head").exists()
    assert main(words("cut", "--resume")) == 0
    whole, cut = (
        load_file(tmp_path / name / "head/model.safetensors") for name in ("whole", "cut")
    )
    for name, value in whole.items():
        np.testing.assert_array_equal(cut[name], value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x"], "the following arguments are required: --data"),
        (["--data", "a.jsonl", "--out", "x"], "a.jsonl is no file; expected one with JSON lines"),
        (["--data", "a", "--out", "x", "--num-depths", "511"], "num_depths is 511; expected 1 to"),
        (["--data", "a", "--out", "x", "--length", "2"], "length is 2; expected at least 3 tokens"),
        (["--data", "a", "--out", "x", "--batch-size", "0"], "batch_size is 0; expected at least"),
        (
            ["--data", "a", "--out", "x", "--num-depths", "0"],
            "num_depths is 0; expected at least 1",
        ),
        (
            ["--data", "a", "--out", "x", "--checkpoint-every", "0"],
            "checkpoint_every is 0; expecte",
        ),
        (["--data", "a", "--out", "x", "--own-samples", "-1"], "own_samples is -1; expected 0 or"),
        (["--data", "a", "--out", "x", "--learning-rate", "nan"], "learning_rate is nan; expected"),
        (["--data", "a", "--out", "x", "--seed", "-1"], "seed is -1; expected 0 to 2147483647"),
        (["--data", "a", "--out", "x", "--budget-seconds", "-9"], "budget_seconds is -9.0; expect"),
        (["--data", "a", "--out", "x", "--devices", "999"], "devices is 999; expected at most"),
        (["--data", "a", "--out", "x", "--algorithm", "NGRAM"], "invalid choice: 'NGRAM'"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--devices", "1"] if "--data" in words and "--devices" not in words else []
    assert main(["train-draft", *words, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jspec: error: ")
    assert message in error


def test_the_help_says_what_every_flag_is(capsys: pytest.CaptureFixture[str]) -> None:
    for action in make_parser()._actions:
        assert action.help, action.option_strings
    with pytest.raises(SystemExit):
        main(["train-draft", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "assistant: the assistant's tokens, every line must be a chat (default: all)" in said
    assert (
        "Training steps, unless --budget-seconds ends them (default: 10000, on a CPU 500)" in said
    )


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_defaults_are_the_device_s(on_cpu: bool) -> None:
    words = ["--data", "a", "--out", "x", "--batch-size", "6"]
    options = make_parser().parse_args(words)
    said = set_defaults(options, on_cpu=on_cpu)
    assert (options.batch_size, options.length) == (6, 128 if on_cpu else 512)
    assert (
        said.startswith("on a CPU the defaults are small: --num-steps 500, --length 128") == on_cpu
    )
    assert "batch" not in said
    every = [word for name in DEFAULTS for word in (f"--{name.replace('_', '-')}", "7")]
    assert not set_defaults(make_parser().parse_args([*words, *every]), on_cpu=on_cpu)


def test_bad_lines_may_be_skipped_by_flag() -> None:
    words = ["--data", "a", "--out", "x", "--devices", "1"]
    jobs = [
        job_of(make_parser().parse_args([*words, *more])) for more in ((), ("--skip-bad-lines",))
    ]
    assert [job.skips_bad_lines for job in jobs] == [False, True]
    assert jobs[0].settings() == jobs[1].settings()  # either resumes a run of the same rows


def test_the_small_heads_fit_the_bundled_target() -> None:
    target = load_model_spec(BUNDLED / "target")
    eagle, mtp = BUNDLED / "draft_eagle1", BUNDLED / "draft_mtp"
    check_eagle1(eagle, load_eagle1_config(eagle, target=target))
    config, names = load_mtp_config(mtp, target=target, num_layers=3)
    check_mtp(mtp, config, names)
    lm = BUNDLED / "draft_lm"
    assert load_model_spec(lm).vocab_size == target.vocab_size
    assert sum(f.stat().st_size for folder in (eagle, mtp, lm) for f in folder.iterdir()) < 5e6
