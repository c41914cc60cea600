"""Agents' traffic: turns on a growing prompt, several agents at once, with and without cache.

    python -m benchmarks.agents [--agents 16] [--turns 20] [--window W] [--out FILE]

Each agent begins with a prompt that all share, asks, reads the answer, appends what a tool would
have said, and asks again. The bundled pair, float32 on a CPU, temperature 0: both runs must give
the same text, and their acceptance lengths are reported side by side.

--window: every other layer of the target sees W tokens only, as in gpt-oss. The weights were not
made for that, so the text is worse; what is computed and what is found is as it would be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe
from jspec import Engine
from jspec.engine.weights.loading import BUNDLED

SHARED = (
    "You write small Python functions.\nRules: no imports, type hints, one docstring.\n"
    "def add(a: int, b: int) -> int:\n    return a + b\n\n"
) * 2


async def run_agent(engine: Any, name: int, *, turns: int, answer: int) -> dict[str, Any]:
    """One conversation; the text is all that it wrote, first_s the seconds to each first token."""
    prompt, first_s, said, cached, prompted = SHARED + f"# agent {name}\n", [], [], 0, 0
    params = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
    for turn in range(turns):
        prompt += f"# task {turn}: write function number {name * turns + turn}\ndef "
        started, last = time.perf_counter(), None
        async for result in await engine.async_generate(prompt, params, stream=True):
            if last is None:
                first_s.append(time.perf_counter() - started)
            last = result
        assert last is not None
        said.append(last["text"])
        prompt += last["text"] + "\n"
        cached += last["meta_info"]["cached_tokens"]
        prompted += last["meta_info"]["prompt_tokens"]
    return {"said": said, "first_s": first_s, "cached": cached, "prompted": prompted}


def write_windowed(directory: Path, *, window: int) -> None:
    """The bundled target, its files linked, with a window in every other layer."""
    for file in (BUNDLED / "target").iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    fields = json.loads((BUNDLED / "target" / "config.json").read_text())
    count = fields["num_hidden_layers"]
    fields |= {
        "architectures": ["MistralForCausalLM"],  # Llama's layers, and it knows windows
        "model_type": "mistral",
        "sliding_window": window,
        "layer_types": [("full_attention", "sliding_attention")[i % 2] for i in range(count)],
    }
    (directory / "config.json").write_text(json.dumps(fields))


def run(
    *, agents: int, turns: int, answer: int, has_cache: bool, window: int | None
) -> tuple[dict[str, Any], Any]:
    """What was measured, and what the agents wrote."""
    arguments: dict[str, Any] = {"disable_radix_cache": not has_cache, "compile_at_start": "all"}
    with ExitStack() as stack:
        if window is not None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_windowed(directory, window=window)
            draft = str(BUNDLED / "draft")
            arguments |= {"model_path": str(directory), "speculative_draft_model_path": draft}
            arguments["speculative_algorithm"] = "EAGLE3"
        engine = stack.enter_context(Engine(max_running_requests=agents, **arguments))
        engine.generate("def ", {"max_new_tokens": 8, "temperature": 0})

        async def run_all() -> list[dict[str, Any]]:
            return list(
                await asyncio.gather(
                    *(run_agent(engine, i, turns=turns, answer=answer) for i in range(agents))
                )
            )

        started = time.perf_counter()
        done = asyncio.run(run_all())
        seconds = time.perf_counter() - started
        stats = engine.stats
    first_s = [s for agent in done for s in agent["first_s"]]
    prompted = sum(agent["prompted"] for agent in done)
    result = {
        "seconds": round(seconds, 2),
        "prompt_tokens": prompted,
        "cached_share": round(sum(agent["cached"] for agent in done) / prompted, 4),
        "first_token_p50_s": round(float(np.percentile(first_s, 50)), 3),
        "first_token_p99_s": round(float(np.percentile(first_s, 99)), 3),
        "acceptance_length": round(stats.counters.acceptance_length, 4),
        "num_retractions": stats.num_retractions,
        "num_leaked_pages": stats.num_leaked_pages,
        "window_pages": stats.num_free_window_pages,
    }
    return result, [agent["said"] for agent in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--window", type=int, help="tokens that every other layer sees")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = {
        "agents": args.agents,
        "turns": args.turns,
        "answer": args.answer,
        "window": args.window,
    }
    without, said = run(**sizes, has_cache=False)
    with_cache, said_again = run(**sizes, has_cache=True)
    result = {
        **describe(),
        **sizes,
        "without_cache": without,
        "with_cache": with_cache,
        "same_text": said == said_again,
        "times_as_fast": round(without["seconds"] / with_cache["seconds"], 2),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
