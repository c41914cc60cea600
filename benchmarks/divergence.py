"""The rate at which rounding changes the text: first divergence of speculative from plain tokens.

    python -m benchmarks.divergence [--out benchmarks/results/divergence.json]
    python -m benchmarks.divergence --pair wide        (the same pair, where heads of 32 do not fit)
    python -m benchmarks.divergence --only 'bfloat16/pallas/*'                   (some engines)
    JAX_PLATFORMS=cpu python -m benchmarks.divergence --quick                     (a smoke test)

Verification is exact: it chooses the token that plain decoding would. Its N nodes and one decode
step are multiplied in different shapes, though, and sums in bfloat16 then round differently, so a
near-tie can be decided differently. The text after that token differs, so each prompt counts up to
its first divergence. The control is float32 with full-precision products, in which no prompt may
diverge.

Divergence without speculation is measured, too: the same call repeated (rows meet in other
batches), each prompt alone, and one attention backend compared with the other. Prompts are shorter
than a page, so none comes from the prefix cache.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks.divergence_counts import Row, compare, table
from benchmarks.divergence_pairs import PAIRS, Ids, Pair, backend_problem, make_pair
from benchmarks.environment import write_result
from benchmarks.h200_table import describe_error
from benchmarks.heldout import results_path
from benchmarks.workloads import MODES
from jspec import Engine

PAGE_SIZE = 64
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of a run. seconds: start no engine that would likely end later."""

    num_prompts: int = 32
    prompt_tokens: int = 60
    new_tokens: int = 128
    num_rows: int = 8  # decoded at once
    num_alone: int = 8  # prompts that are also decoded one by one
    seconds: float = 100.0
    temperatures: tuple[float, ...] = TEMPERATURES
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    dtype: str
    backend: str
    mode: str

    @property
    def label(self) -> str:
        return f"{self.dtype}/{self.backend}/{self.mode}"


def configurations(groups: Sequence[tuple[str, str]]) -> tuple[Configuration, ...]:
    """Return the configurations; plain comes first in each group, as the reference."""
    return tuple(
        Configuration(dtype=dtype, backend=backend, mode=mode)
        for (dtype, backend), mode in itertools.product(groups, MODES)
    )


def only(todo: Sequence[Configuration], patterns: Sequence[str]) -> tuple[Configuration, ...]:
    """Return those whose label matches a pattern. Raises ValueError for one that matches none.

    In:  patterns float32/*/tree     Out: float32/xla/tree
    """
    labels = [configuration.label for configuration in todo]
    for pattern in patterns:
        if not fnmatch.filter(labels, pattern):
            raise ValueError(f"{pattern!r} is none of {', '.join(labels)}")
    return tuple(c for c in todo if any(fnmatch.fnmatch(c.label, p) for p in patterns))


# One engine.


def engine_arguments(
    pair: Pair, configuration: Configuration, settings: Settings
) -> dict[str, Any]:
    """Return arguments with small sizes, since each bucket takes seconds to compile."""
    context = settings.prompt_tokens + settings.new_tokens
    shared = {
        **pair.arguments,
        "skip_tokenizer_init": True,
        "dtype": configuration.dtype,
        "attention_backend": configuration.backend,
        "page_size": PAGE_SIZE,
        "context_length": context,
        "max_running_requests": settings.num_rows,
        "max_queued_requests": max(128, settings.num_prompts),
        "max_total_tokens": settings.num_rows * (context + 2 * PAGE_SIZE),  # none waits for pages
        "chunked_prefill_size": 128,
        "compile_at_start": "common",  # a larger program than needed may round otherwise
        **settings.engine,
    }
    shape = MODES[configuration.mode]
    if shape is None:
        return {**shared, "speculative_algorithm": "NONE"}
    steps, topk, nodes = shape
    return {
        **shared,
        **pair.draft_arguments,
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }


@contextmanager
def full_products(dtype: str) -> Iterator[None]:
    """Disable reduced-precision float32 products, in all threads, as engines compile in several."""
    before = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def sampling_params(temperature: float, seed: int, settings: Settings) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "max_new_tokens": settings.new_tokens,
        "sampling_seed": seed,
        "ignore_eos": True,
    }


def decode_all(
    engine: Engine, prompts: Sequence[Ids], temperature: float, settings: Settings
) -> tuple[list[Ids], float]:
    """Return (ids of each prompt, mean acceptance length) of one call. Prompt i has seed i."""
    params = [sampling_params(temperature, i, settings) for i in range(len(prompts))]
    results = engine.generate(input_ids=list(prompts), sampling_params=params)
    lengths = [result["meta_info"].get("acceptance_length", 1.0) for result in results]
    return [tuple(result["output_ids"]) for result in results], statistics.mean(lengths)


def decode_alone(
    engine: Engine, prompts: Sequence[Ids], temperature: float, settings: Settings
) -> list[Ids]:
    """Return the ids of each prompt, decoded one after the other."""
    texts: list[Ids] = []
    for i, prompt in enumerate(prompts):
        params = sampling_params(temperature, i, settings)
        texts.append(tuple(engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]))
    return texts


# The whole run.


class Measurement:
    """Results and plain texts so far; the file is rewritten after each configuration."""

    def __init__(self, pair: Pair, settings: Settings, path: Path) -> None:
        self._pair = pair
        self._settings = settings
        self._path = path
        self._texts: dict[tuple[str, str, str, float], list[Ids]] = {}  # dtype, backend, mode, T
        self.engines: dict[str, Row] = {}
        self.rows: list[Row] = []

    @property
    def is_sound(self) -> bool:
        """Return whether no configuration failed and no control diverged."""
        failed = any("error" in entry for entry in self.engines.values())
        return not failed and not any(
            row["is_control"] and row.get("num_diverged") for row in self.rows
        )

    def run(self, todo: Sequence[Configuration]) -> None:
        """Measure each configuration, even if others fail."""
        start, longest = time.monotonic(), 0.0
        for configuration in todo:
            before = time.monotonic()
            if before - start + longest > self._settings.seconds:
                entry: Row = {"skipped": "out of time"}
            else:
                entry = self._attempt(configuration)
                longest = max(longest, time.monotonic() - before)
            self.engines[configuration.label] = entry
            print(f"{configuration.label:24} {entry}", flush=True)
            self._write()

    def _attempt(self, configuration: Configuration) -> Row:
        arguments = engine_arguments(self._pair, configuration, self._settings)
        try:
            problem = backend_problem(self._pair, arguments)
            if problem is not None:
                return {"skipped": problem}
            with full_products(configuration.dtype), Engine(**arguments) as engine:
                return self._measure(engine, configuration)
        except Exception as error:  # any failure; the others are still measured
            return {"error": describe_error(error)}

    def _measure(self, engine: Engine, configuration: Configuration) -> Row:
        started = time.monotonic()
        lengths: dict[str, float] = {}
        for temperature in self._settings.temperatures:
            texts, length = decode_all(engine, self._pair.prompts, temperature, self._settings)
            lengths[f"temperature {temperature:g}"] = round(length, 3)
            self._compare(engine, configuration, temperature, texts)
        return {
            "startup_seconds": round(engine.startup_seconds, 2),
            "seconds": round(time.monotonic() - started, 2),
            "acceptance_length": lengths,
        }

    def _compare(
        self, engine: Engine, configuration: Configuration, temperature: float, texts: list[Ids]
    ) -> None:
        """Compare speculation with plain decoding, plain decoding with another backend, and each
        with itself in another call, plain decoding also in another batch.
        """
        dtype, backend, mode = configuration.dtype, configuration.backend, configuration.mode
        self._texts[dtype, backend, mode, temperature] = texts
        add = partial(self._add, configuration, temperature)
        if mode != "plain":
            add(mode, "plain", texts)
        elif backend != "xla":
            add("plain", "xla plain", texts)
        if dtype == "float32":
            return
        prompts = self._pair.prompts
        again, _ = decode_all(engine, prompts, temperature, self._settings)
        add(f"{mode} again", mode, again)
        if mode == "plain":
            few = prompts[: self._settings.num_alone]
            add("plain, alone", "plain", decode_alone(engine, few, temperature, self._settings))

    def _add(
        self,
        configuration: Configuration,
        temperature: float,
        what: str,
        against: str,
        texts: list[Ids],
    ) -> None:
        """Add one result, or an error if the reference texts failed. against: a mode of the same
        backend, or "xla plain"; of the same dtype.
        """
        dtype, backend = configuration.dtype, configuration.backend
        row: Row = {
            "dtype": dtype,
            "backend": backend,
            "what": what,
            "against": against,
            "temperature": temperature,
            "is_control": dtype == "float32",
        }
        other, mode = ("xla", "plain") if against == "xla plain" else (backend, against)
        references = self._texts.get((dtype, other, mode, temperature))
        if references is None:
            row["not_compared"] = f"no texts of {against}"
        else:
            row |= compare(texts, references[: len(texts)])
        self.rows.append(row)

    def _write(self) -> None:
        settings = {
            name: getattr(self._settings, name)
            for name in Settings.__dataclass_fields__
            if name != "engine"
        }
        result = {
            "pair": self._pair.name,
            "head_dim": self._pair.layers[0].one_layer.attention.head_dim,
            "settings": settings,
            "engines": self.engines,
            "rows": self.rows,
        }
        write_result(self._path, result)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a configuration failed or a control diverged."""
    usual = Settings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", choices=tuple(PAIRS), default="bundled")
    parser.add_argument("--prompts", type=int, default=usual.num_prompts)
    parser.add_argument("--new-tokens", type=int, default=usual.new_tokens)
    parser.add_argument("--batch", type=int, default=usual.num_rows, help="rows at once")
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="DTYPE/BACKEND/MODE")
    parser.add_argument("--quick", action="store_true", help="4 prompts of 16 tokens, xla only")
    parser.add_argument("--out", type=Path, help="default: results/divergence[_PAIR].json")
    args = parser.parse_args(argv)
    sizes: dict[str, Any] = {
        "num_prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "num_rows": args.batch,
        "seconds": args.seconds,
    }
    groups = [("bfloat16", "xla"), ("bfloat16", "pallas"), ("float32", "xla")]
    if args.quick:
        sizes |= {"num_prompts": 4, "new_tokens": 16, "num_rows": 4, "num_alone": 2, "seconds": 600}
        groups.remove(("bfloat16", "pallas"))
    try:
        todo = only(configurations(groups), args.only)
    except ValueError as error:
        parser.error(f"argument --only: {error}")
    settings = Settings(**sizes)
    name = "divergence" if args.pair == "bundled" else f"divergence_{args.pair}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "quick.json" if args.quick else results_path(name)
        pair = make_pair(
            args.pair,
            Path(folder),
            num_prompts=settings.num_prompts,
            prompt_tokens=settings.prompt_tokens,
        )
        measurement = Measurement(pair, settings, args.out or out)
        measurement.run(todo)
    print(table(measurement.rows))
    return 0 if measurement.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
