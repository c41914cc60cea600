"""`jspec bench`: compare plain and speculative decoding, or load a server."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jspec.cli.flag_table import GROUPS
from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.cli.measurement.backends import BACKENDS
from jspec.cli.measurement.environment import describe, now_utc, without_paths
from jspec.cli.measurement.report import check_can_plot, plot, table, write_json
from jspec.cli.measurement.settings import DATASETS, MODES, BenchSettings
from jspec.engine.interrupts import interruptible
from jspec.engine.memory.device_memory import share_for_server
from jspec.errors import ConfigError
from jspec.server.server_args import Settings

ENGINE_GROUPS = tuple(title for title in GROUPS if title != "Server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    json: Path | None
    plot: Path | None
    trace: Path | None

    def check(self) -> None:
        for name, path in (("output_file", self.json), ("plot", self.plot), ("trace", self.trace)):
            if path is None:
                continue
            folder = path.parent
            if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
                why = "is a directory" if path.is_dir() else f"{str(folder)!r} cannot be written to"
                raise ConfigError(f"{name} is {str(path)!r}, but {why}; expected a file to write")
        if self.plot is not None:
            check_can_plot()


def run_bench(argv: Sequence[str]) -> int:
    """Return exit status 0 if all requests succeeded, else 1."""
    parser = make_parser()
    options, asked = parse_flags(parser, argv)
    settings = settings_of(options)
    outputs = Outputs(json=options.output_file, plot=options.plot, trace=options.trace)
    outputs.check()
    for warning in asked.warnings:
        print(f"jspec: warning: {warning}", file=sys.stderr)
    result, trace = _measure(options, asked, settings)
    command = " ".join(["jspec bench", *without_paths(_without_key(argv))])
    result = {
        "environment": {**describe(command, chip=result.pop("chip")), "date": now_utc()},
        "settings": _shown(settings),
        **result,
    }
    print(table(result))
    if outputs.json is not None:
        write_json(outputs.json, result)
    if outputs.trace is not None:
        write_json(outputs.trace, trace)
    if outputs.plot is not None:
        plot(outputs.plot, result)
    return int(any(mode["num_errors"] for mode in result["modes"].values()))


def _measure(
    options: argparse.Namespace, asked: Settings, settings: BenchSettings
) -> tuple[dict[str, Any], dict[str, Any]]:
    if options.base_url is not None:
        from jspec.cli.measurement.online import Servers, run_online

        servers = Servers(
            base_url=options.base_url,
            baseline_url=options.baseline_url,
            api_key=options.bearer,
            flush_cache=options.flush_cache,
            model=_model_name(asked),
        )
        return asyncio.run(run_online(servers, settings, say=_say))
    os.environ.update(share_for_server(os.environ))  # jax reads these when its backend starts
    with interruptible():
        from jspec.cli.measurement.offline import run_offline

        return run_offline(
            asked.engine_args,
            asked.engine,
            settings,
            mode=options.mode,
            is_traced=options.trace is not None,
            say=_say,
        )


def _model_name(asked: Settings) -> str | None:
    """Return --model, the only engine flag that also applies to a server."""
    others = sorted(set(asked.engine) - {"model_path"})
    if others:
        raise ConfigError(
            f"{others[0]} is for an engine of one's own, and base_url names a server; expected one "
            f"of them"
        )
    return asked.engine.get("model_path")


def make_parser() -> FlagParser:
    parser = FlagParser(
        prog="jspec bench",
        allow_abbrev=False,
        description="Measure plain and speculative decoding, alternating, on local engines (the "
        "bundled pair, or --model-path), or a server under load (--base-url).",
        epilog="Docs: docs/bench.md. All other flags are those of jspec serve, for the engine.",
    )
    _add_load(parser)
    _add_prompts(parser)
    _add_server(parser)
    _add_output(parser)
    add_flags(parser, groups=ENGINE_GROUPS)
    return parser


def _add_load(parser: FlagParser) -> None:
    load = parser.add_argument_group("Load")
    load.add_argument("--num-prompts", type=int, default=8, help="Requests per run (8)")
    load.add_argument(
        "--repeats", type=int, default=3, help="Runs of each mode; the result is their median (3)"
    )
    load.add_argument(
        *("--concurrency", "--max-concurrency"),
        *("--max-concurrent-requests",),
        dest="concurrency",
        type=int,
        help="Maximum concurrent requests (1; with --request-rate: unlimited)",
    )
    load.add_argument(
        "--request-rate",
        type=float,
        help="Requests per second (Poisson arrivals); inf: all at once",
    )
    load.add_argument(
        "--temperature", type=float, default=0.0, help="Sampling temperature; 0 is greedy (0)"
    )
    load.add_argument("--seed", type=int, default=0, help="Seed of the load (0)")
    load.add_argument(
        "--disable-ignore-eos", action="store_true", help="Let answers end at an EOS token"
    )


def _add_prompts(parser: FlagParser) -> None:
    prompts = parser.add_argument_group("Prompts")
    prompts.add_argument(
        "--dataset-name",
        default=None,
        help=f"Prompts: {', '.join(DATASETS)}; text (the default) is Python source that the "
        "bundled pair never saw",
    )
    prompts.add_argument(
        "--dataset-path", type=Path, help="File of JSON lines, or ShareGPT's JSON list"
    )
    prompts.add_argument(
        *("--random-input-len", "--input-len"),
        dest="input_len",
        type=int,
        default=64,
        help="Maximum tokens per prompt (64)",
    )
    prompts.add_argument(
        *("--random-prefix-len", "--prefix-len"),
        dest="prefix_len",
        type=int,
        default=0,
        help="Tokens of a common prefix before every random prompt (0)",
    )
    prompts.add_argument(
        *("--random-output-len", "--output-len", "--sharegpt-output-len"),
        dest="output_len",
        type=int,
        default=64,
        help="Maximum tokens per answer (64)",
    )
    prompts.add_argument(
        "--random-range-ratio",
        type=float,
        default=1.0,
        help="Ratio of shortest to longest length (1)",
    )
    prompts.add_argument(
        "--vocab-size",
        type=int,
        help="Upper bound of random token ids; unset with a server: words instead of ids",
    )


def _add_server(parser: FlagParser) -> None:
    server = parser.add_argument_group("A server")
    server.add_argument("--base-url", "--url", help="http://HOST:PORT of a running server")
    server.add_argument(
        "--baseline-url", help="URL of a second server, without speculation, measured alternately"
    )
    server.add_argument("--backend", default="jspec", help=f"API: {', '.join(BACKENDS)} (jspec)")
    server.add_argument(
        "--api-key",
        dest="bearer",
        default=os.environ.get("OPENAI_API_KEY"),
        help="API key of the server",
    )
    server.add_argument(
        "--flush-cache", action="store_true", help="Call /flush_cache before each run"
    )


def _add_output(parser: FlagParser) -> None:
    output = parser.add_argument_group("Output")
    output.add_argument("--output-file", type=Path, help="Write all results as JSON")
    output.add_argument(
        "--plot", type=Path, help="Write a plot (.png, .svg, .pdf); needs matplotlib"
    )
    output.add_argument("--trace", type=Path, help="Write a timeline for ui.perfetto.dev")
    output.add_argument(
        "--mode", default="both", choices=MODES, help="Modes to run on local engines (both)"
    )


def settings_of(options: argparse.Namespace) -> BenchSettings:
    name = options.dataset_name or ("text" if options.dataset_path is None else "jsonl")
    if options.base_url is None and options.baseline_url is not None:
        raise ConfigError(
            f"baseline_url is {options.baseline_url!r} without base_url; expected --base-url too"
        )
    return BenchSettings(
        num_prompts=options.num_prompts,
        repeats=options.repeats,
        concurrency=options.concurrency,
        request_rate=options.request_rate,
        dataset_name=name,
        dataset_path=options.dataset_path,
        input_len=options.input_len,
        prefix_len=options.prefix_len,
        output_len=options.output_len,
        range_ratio=options.random_range_ratio,
        vocab_size=options.vocab_size,
        temperature=options.temperature,
        seed=options.seed,
        ignore_eos=not options.disable_ignore_eos,
        backend=options.backend,
    )


def _shown(settings: BenchSettings) -> dict[str, Any]:
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    path, rate = settings.dataset_path, settings.request_rate
    values["dataset_path"] = None if path is None else path.name
    values["request_rate"] = "inf" if rate is not None and math.isinf(rate) else rate
    return values


def _without_key(argv: Sequence[str]) -> list[str]:
    words = list(argv)
    for at, word in enumerate(words):
        if word == "--api-key" and at + 1 < len(words):
            words[at + 1] = "***"
        elif word.startswith("--api-key="):
            words[at] = "--api-key=***"
    return words


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
