"""`jspec doctor [PROMPTS]`: explain why speculation does not pay, and how to repair it.

`jspec doctor --device` examines the devices instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jspec.cli.flags import FlagParser
from jspec.cli.verify import SMALL, read_flags, say, write_json
from jspec.engine.interrupts import interruptible

if TYPE_CHECKING:
    from jspec.cli.diagnosis.records import Diagnosis

DEVICE = "--device"
DEVICE_HELP = "examine the devices alone: versions, memory, and a first measurement (one minute)"


def run_doctor(argv: Sequence[str]) -> int:
    """Return 0 whatever is found, since a pair that does not pay is not a failure."""
    if _is_device_alone(argv):
        return _run_device(argv)
    parser = FlagParser(
        prog="jspec doctor",
        allow_abbrev=False,
        description="Measure a pair on texts that it generates and explain why speculation does "
        "not pay: how often the head agrees with its target, what steps cost, and what in the "
        "head's files is wrong.",
        epilog="Without --model-path, the bundled pair; without PROMPTS, examples of Python code. "
        f"jspec doctor {DEVICE}: {DEVICE_HELP}.",
    )
    options, engine = read_flags(
        parser, argv, max_new_tokens=128, unset_temperature="the model's own sampling"
    )
    with interruptible():
        from jspec.cli.diagnosis.doctor import DoctorSettings, chain_arguments, examine
        from jspec.cli.diagnosis.prompts import examples, first_of, read_prompts

    chain_arguments(engine)  # raises for an engine that does not draft
    prompts = examples() if options.prompts is None else read_prompts(Path(options.prompts))
    found = examine(
        {**SMALL, "disable_logprobs": True, **engine},
        tuple(first_of(prompts, options.num_prompts)),
        DoctorSettings(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
        ),
        say=say,
    )
    print(text_of(found))
    write_json(options.output, found.to_json())
    return 0


def _is_device_alone(argv: Sequence[str]) -> bool:
    """Return whether --device has no value. With a value it is SGLang's flag, which is ignored."""
    after = argv[argv.index(DEVICE) + 1 :][:1] if DEVICE in argv else ["none"]
    return not after or after[0].startswith("-")


def _run_device(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="jspec doctor --device",
        allow_abbrev=False,
        description="Report the devices that jax has: kinds, versions, memory; measure a dispatch, "
        "a read, attention, and sums over several devices. Exit status 1 if jax fell back to CPUs.",
    )
    parser.add_argument(DEVICE, action="store_true", required=True, help=DEVICE_HELP)
    parser.add_argument("--output", metavar="FILE.json", help="Also write the report as JSON")
    options = parser.parse_args(argv)
    with interruptible():
        from jspec.cli.diagnosis.device import examine_device

    found = examine_device(say=say)
    print("\n".join(found.lines()))
    write_json(options.output, found.to_json())
    return 1 if found.problems else 0


def text_of(found: Diagnosis) -> str:
    return "\n".join(
        (*_pair_lines(found), *_agreement_lines(found), *_cost_lines(found), *_verdict(found))
    )


def _pair_lines(found: Diagnosis) -> list[str]:
    pair = found.pair
    ids = f", aux layers {list(pair.aux_layer_ids)}" if pair.aux_layer_ids else ""
    theta = "" if pair.rope_theta is None else f", rope_theta {pair.rope_theta:g}"
    lines = [
        f"{pair.algorithm} {pair.shape}, {pair.dtype}; head {pair.head}{ids}{theta} "
        f"(target {pair.target_rope_theta:g})"
    ]
    if pair.windows:
        lines.append(f"the target's windows: {', '.join(map(str, pair.windows))}")
    if found.coverage is not None and pair.draft_vocab_size is not None:
        lines.append(
            f"draft vocabulary: {pair.draft_vocab_size} ids, {100 * found.coverage:.1f}% of the "
            "tokens that the target chose"
        )
    if found.templates:
        cost = found.templates[0]
        lines.append(
            f"chat template: {cost.num_tokens} tokens of markup, {cost.nats:.1f} nats each"
            if cost.num_tokens
            else "chat template: no markup"
        )
    return lines


def _agreement_lines(found: Diagnosis) -> list[str]:
    served = "  ".join(f"{x:.2f}" for x in found.served_by_depth)
    lines = [
        f"{found.num_texts} texts, {found.num_tokens} tokens; acceptance length "
        f"{found.acceptance_length:.2f}",
        f"  agreement by depth, served         {served}",
    ]
    if found.forced_by_depth is None:
        return [*lines, "  teacher-forced: not for this drafter"]
    forced = "  ".join(f"{x:.2f}" for x in found.forced_by_depth)
    lines.append(
        f"                      teacher-forced {forced}   (sure of {found.confidence:.2f})"
    )
    lines.append(
        f"  served steps unlike teacher-forced ones: {100 * (found.unlike_served or 0):.1f}%"
    )
    lines += [
        f"  tokens {each.first} to {each.last if each.last < 2**30 else 'the end'}: depth 1 served "
        f"{each.served:.2f} ({each.num_served} steps), teacher-forced {each.forced:.2f} "
        f"({each.num_forced})"
        for each in found.buckets
    ]
    return lines


def _cost_lines(found: Diagnosis) -> list[str]:
    draft = ""
    if found.propose_seconds is not None:
        draft = f", of it drafting {1e3 * found.propose_seconds:.2f} ms"
    return [
        f"a step of one row: plain {1e3 * found.plain_step_seconds:.2f} ms, speculative "
        f"{1e3 * found.step_seconds:.2f} ms{draft}",
        f"speed-up: {found.acceptance_length:.2f} tokens a step x "
        f"{found.plain_step_seconds / found.step_seconds:.2f} = {found.speedup:.2f} "
        f"± {found.speedup_margin:.2f}",
    ]


def _verdict(found: Diagnosis) -> list[str]:
    lines = [f"not decided: {each}" for each in found.undecided]
    if found.undecided:
        lines.append("  measure with more prompts or --max-new-tokens")
    if found.findings:
        for each in found.findings:
            lines += [f"FOUND ({each.kind}): {each.what}", f"  repair: {each.repair}"]
        return lines
    if found.pays is None:
        lines.append(
            f"not decided: whether speculation pays: {found.speedup:.2f} ± "
            f"{found.speedup_margin:.2f} includes 1; measure on a quieter machine, or with more "
            "prompts or --max-new-tokens"
        )
        return lines
    return [*lines, *_conclusion(found)]


def _conclusion(found: Diagnosis) -> list[str]:
    if found.undecided:
        return []
    if found.pays:
        return ["well: nothing is wrong with the pair, and speculation pays"]
    return [
        "nothing is wrong with the pair; speculation does not pay since a step costs "
        f"{found.step_seconds / found.plain_step_seconds:.1f} plain ones and emits "
        f"{found.acceptance_length:.1f} tokens: try fewer --speculative-num-steps"
    ]
