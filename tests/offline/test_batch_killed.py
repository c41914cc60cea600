"""Ten thousand lines through `jspec batch`, killed five times, give the same file.

It takes minutes: pytest -n 0 -m exhaustive tests/offline/test_batch_killed.py.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(3600)]

NUM_LINES, NUM_KILLS = 10_000, 5
FLAGS = ("--dtype", "float32", "--max-running-requests", "32", "--disable-logprobs")
CREATED = re.compile(rb'"created": (\d+)')


def request_line(number: int) -> dict[str, Any]:
    """Return a request without seed, at the model's own temperature; one in fifty is invalid."""
    limit = -1 if number % 50 == 0 else 1 + number % 4
    url, body = "/v1/completions", {"prompt": f"x{number} = ", "max_tokens": limit}
    if number % 3 == 0:
        messages = [{"role": "user", "content": f"def f{number}("}]
        url, body = "/v1/chat/completions", {"messages": messages, "max_tokens": limit}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def start(requests: Path, answers: Path, cache: Path) -> subprocess.Popen[bytes]:
    words = ("batch", str(requests), str(answers), *FLAGS, "--compilation-cache-dir", str(cache))
    return subprocess.Popen(
        [sys.executable, "-m", "jspec.cli.main", *words], stderr=subprocess.DEVNULL
    )


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_ten_thousand_lines_killed_five_times_are_the_same_file(tmp_path: Path) -> None:
    requests, whole, torn = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "torn.jsonl"))
    lines = [json.dumps(request_line(n)) for n in range(1, NUM_LINES + 1)]
    requests.write_text("".join(f"{line}\n" for line in lines))
    assert start(requests, whole, tmp_path / "programs").wait() == 0
    rng, kept = random.Random(12), []
    for kill in range(NUM_KILLS):
        process = start(requests, torn, tmp_path / "programs")
        most = NUM_LINES * (kill + 1) // (NUM_KILLS + 1)
        until = rng.randint(max(most - 800, 1), most)
        while num_lines(torn) < until:
            assert process.poll() is None
            time.sleep(rng.uniform(0.01, 0.05))
        process.kill()
        process.wait()
        kept.append(num_lines(torn))
    assert kept == sorted(kept)
    assert kept[-1] < NUM_LINES
    assert start(requests, torn, tmp_path / "programs").wait() == 0
    found = torn.read_bytes()
    assert len(set(CREATED.findall(found))) == 1  # the first run's, in every line
    assert CREATED.sub(b"", found) == CREATED.sub(b"", whole.read_bytes())
    answers = [json.loads(line) for line in found.splitlines()]
    assert [a["custom_id"] for a in answers] == [f"r{n}" for n in range(1, NUM_LINES + 1)]
    statuses = [a["response"]["status_code"] for a in answers]
    assert statuses.count(400) == NUM_LINES // 50
    assert statuses.count(200) == NUM_LINES - NUM_LINES // 50
