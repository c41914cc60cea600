"""`jspec verify [PROMPTS]`: check on the user's own prompts that speculation changes nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspec.cli.flag_table import GROUPS
from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.engine.interrupts import interruptible
from jspec.engine.memory.device_memory import share_for_server
from jspec.errors import ConfigError
from jspec.files.output_files import write_text
from jspec.messages.request import SamplingParams

if TYPE_CHECKING:
    from jspec.cli.diagnosis.verify import Fault, VerifyReport

ENGINE_GROUPS = tuple(title for title in GROUPS if title != "Server")
UNLISTED = (
    "engine_process",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "dist_timeout",
)  # refused by `check_reads_weights`
MAX_SHOWN = 10  # faults that the report lists
# The minimum to compile for the comparison: two rows, so that batches differ.
SMALL = {"max_running_requests": 2, "chunked_prefill_size": 32}


def run_verify(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="jspec verify",
        allow_abbrev=False,
        description="Replay prompts with and without speculation and classify each difference by "
        "its margin: a tie flipped by rounding, or a fault. Only faults fail.",
        epilog="Without --model-path, the bundled pair; without PROMPTS, examples of Python code.",
    )
    options, engine = read_flags(
        parser, argv, max_new_tokens=64, unset_temperature="both 0 and the model's own sampling"
    )
    with interruptible():
        from jspec.cli.diagnosis.prompts import examples, first_of, read_prompts
        from jspec.cli.diagnosis.verify import VerifySettings, check_speculates, verify

    check_speculates(engine)
    prompts = examples() if options.prompts is None else read_prompts(Path(options.prompts))
    temperatures = (0.0, None) if options.temperature is None else (options.temperature,)
    report = verify(
        {**SMALL, **engine},
        first_of(prompts, options.num_prompts),
        VerifySettings(
            max_new_tokens=options.max_new_tokens, temperatures=temperatures, seed=options.seed
        ),
        say=say,
    )
    print(text_of(report))
    write_json(options.output, report.to_json())
    return 1 if report.num_faults else 0


def read_flags(
    parser: FlagParser, argv: Sequence[str], *, max_new_tokens: int, unset_temperature: str
) -> tuple[Any, Mapping[str, Any]]:
    """Return the checked options and engine arguments of `jspec verify` and `jspec doctor`."""
    parser.add_argument(
        "prompts",
        nargs="?",
        metavar="PROMPTS",
        help='.jsonl with {"prompt"}, {"messages"} or {"input_ids"} per line, or a text file with '
        "one prompt per line",
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=12,
        help="Most prompts of the file, evenly spread (12)",
    )
    parser.add_argument("--output", metavar="FILE.json", help="Also write the report as JSON")
    parser.add_argument(
        "--temperature", type=float, help=f"Sampling temperature; unset: {unset_temperature}"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        help=f"Maximum tokens per text ({max_new_tokens})",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Seed of the first text; later texts count up from it (0)",
    )
    add_flags(parser, groups=ENGINE_GROUPS, unlisted=UNLISTED)
    options, settings = parse_flags(parser, argv)
    _check_options(options)
    check_reads_weights(parser.prog, settings.engine)
    warn(settings.warnings)
    os.environ.update(share_for_server(os.environ))
    return options, settings.engine


def _check_options(options: Any) -> None:
    SamplingParams.from_mapping({"temperature": options.temperature})
    if options.num_prompts < 1:
        raise ConfigError(f"--num-prompts is {options.num_prompts}; expected at least 1")
    if options.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {options.max_new_tokens}; expected at least 1")
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise ConfigError(
            f"--output is {options.output!r}; expected a file in a folder that is there"
        )


def check_reads_weights(command: str, engine: Mapping[str, Any]) -> None:
    """Raise ConfigError before start if the engine's weights would be in another process."""
    if (engine.get("nnodes") or 1) > 1:
        raise ConfigError(
            f"--nnodes is {engine['nnodes']}, but {command} reads weights in its own process; "
            "expected it unset"
        )
    if engine.get("engine_process"):
        raise ConfigError(
            f"--engine-process is set, but {command} reads weights in its own process; expected it "
            "unset (the results are the same)"
        )


def warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"jspec: warning: {warning}", file=sys.stderr)


def say(text: str) -> None:
    print(f"jspec: {text}", file=sys.stderr, flush=True)


def write_json(path: str | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        write_text(Path(path), json.dumps(report, indent=1) + "\n")


def text_of(report: VerifyReport) -> str:
    ours, plain = report.speculation, report.plain
    rows = [
        ("tokens", str(ours.num_tokens), str(plain.num_tokens)),
        ("texts unlike the first plain run's", str(ours.num_other), str(plain.num_other)),
        (
            "tie flips per 1,000 tokens",
            f"{ours.tie_flips_per_1000:.2f}",
            f"{plain.tie_flips_per_1000:.2f}",
        ),
        ("largest margin", f"{ours.largest_margin:.3g}", f"{plain.largest_margin:.3g}"),
        ("faults", str(len(ours.faults)), str(len(plain.faults))),
    ]
    lines = [
        f"{report.engine} against plain decoding, {report.dtype}: {report.num_texts} texts",
        f"  {'':36}{'speculation':>12}{'plain':>12}",
        *(f"  {name:36}{left:>12}{right:>12}" for name, left, right in rows),
        f"noise: log-probabilities of plain decoding differ by up to {report.noise:.2g} from "
        f"rescored ones; a margin above {report.tolerance:.2g} is a fault",
        *(f"warning: {warning}" for warning in report.warnings),
    ]
    faults = (*ours.faults, *plain.faults)
    lines += [_line_of(fault) for fault in faults[:MAX_SHOWN]]
    if len(faults) > MAX_SHOWN:
        lines.append(f"  ... and {len(faults) - MAX_SHOWN} more")
    return "\n".join([*lines, _verdict(report)])


def _line_of(fault: Fault) -> str:
    size = "" if fault.margin is None else f", margin {fault.margin:.3g}"
    return f"  fault: prompt {fault.prompt}, token {fault.index}: {fault.what}{size}"


def _verdict(report: VerifyReport) -> str:
    if report.speculation.faults:
        return (
            "FAULT: speculation changed what the target chooses, and rounding does not explain it"
        )
    if report.plain.faults:
        return "FAULT: plain decoding itself departs from the target; speculation does not"
    if report.speculation.num_differences:
        return "well: all differences are ties that rounding flipped"
    return "well: speculation changed no token"
