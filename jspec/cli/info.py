"""`jspec info DIR`: describe a checkpoint and what serving it needs, as text or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspec.cli.flags import FlagParser
from jspec.engine.interrupts import interruptible
from jspec.errors import ConfigError
from jspec.spec.accelerators import DeviceGroup, read_devices
from jspec.spec.weight_format import QUANTIZATIONS

if TYPE_CHECKING:
    from jspec.engine.memory.parallel_choices import Advice, Choice, Load
    from jspec.engine.weights.checkpoint_info import CheckpointInfo

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]i?)B?|B)", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def run_info(argv: Sequence[str]) -> int:
    """Return 1 if the checkpoint cannot be served, else 0."""
    options = _parser().parse_args(argv)
    with interruptible():
        from jspec.engine.weights.checkpoint_info import describe
        from jspec.engine.weights.loading import BUNDLED

    served: Any = {
        "target": None if options.target is None else Path(options.target),
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
    }
    devices = None if options.devices is None else read_devices("--devices", options.devices)
    info = describe(
        BUNDLED / "target" if options.directory is None else Path(options.directory),
        dtype=options.dtype,
        memory=None if options.memory is None else size_of("--memory", options.memory),
        **served,
    )
    said, lines = info.to_json(), list(lines_of(info))
    if devices is not None:
        with interruptible():
            from jspec.engine.memory.parallel_choices import Load
            from jspec.engine.weights.device_advice import advise_for

        requests = options.requests
        if requests is None:
            requests = 64 * devices.num_devices
        load = Load(requests=requests, context=options.context_length)
        advice = advise_for(info, devices, load, **served)
        said["devices"] = asdict(advice)
        lines += lines_of_advice(advice, devices, load)
    print(json.dumps(said) if options.json else "\n".join(lines))
    return 1 if info.problems else 0


def _parser() -> FlagParser:
    with interruptible():
        from jspec.models.files.kv_scales import AUTO, DTYPES

    parser = FlagParser(
        prog="jspec info",
        allow_abbrev=False,
        description="Describe a checkpoint: its model, its size and how to serve it. Reads "
        "headers, no weights.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="checkpoint with safetensors, pytorch_model.bin or orbax/; unset: the bundled target",
    )
    parser.add_argument("--target", metavar="DIR", help="the target, if DIR is a draft")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--quantization",
        choices=(*QUANTIZATIONS, "none"),
        help="of the target, as in jspec serve",
    )
    parser.add_argument("--kv-cache-dtype", default=AUTO, choices=(AUTO, *DTYPES))
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of a device, such as 80GB or 24GiB"
    )
    parser.add_argument(
        "--devices",
        metavar="NxNAME",
        help="chips to compare layouts for, such as 8xH200 or 4xv6e (docs/guides/parallelism.md)",
    )
    parser.add_argument(
        "--requests", type=int, help="that decode at the same time (64 for each of --devices)"
    )
    parser.add_argument(
        "--context-length", type=int, default=2048, help="tokens of each of --requests (2048)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def size_of(name: str, text: str) -> int:
    """Return bytes: 80GB is 80 * 10^9, 80GiB is 80 * 2^30. Raises ConfigError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"{name} is {text!r}; expected a size such as 80GB or 24GiB")
    unit = found[2] or ""
    base = 1024 if unit.lower().endswith("i") else 1000
    return int(float(found[1]) * base ** _POWER[unit[:1].upper()])


def lines_of(info: CheckpointInfo) -> Iterator[str]:
    yield f"{info.path}: a {info.kind}, {info.architecture}"
    for name, value in info.shapes.items():
        if value not in (None, []):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"  {name.replace('_', ' ')}: {shown}"
    yield f"  parameters: {info.parameters:,} in {info.num_tensors} tensors"
    stored = ", ".join(f"{kind} {gib(size)}" for kind, size in info.stored_bytes.items())
    yield f"  stored: {stored or 'nothing'}"
    tied = ", including a copy of the tied table for lm_head" if info.tied_bytes else ""
    yield f"  weights as served ({info.dtype}): {gib(info.weight_bytes)}{tied}"
    if info.cache_bytes_per_token:
        yield f"  cache: {info.cache_bytes_per_token:,} bytes a token"
    if info.state_bytes_per_row:
        yield f"  recurrent states: {info.state_bytes_per_row:,} bytes a row"
    if info.algorithm is not None:
        yield f"  drafts for: {info.algorithm}"
    if info.memory is not None:
        fit = info.memory
        room = f"{fit.tokens:,} tokens of cache" if fit.fits else "does not fit"
        yield f"  in {gib(fit.device_bytes)}: {room} (90% used, before a step's own arrays)"
    if info.serve:
        yield f"  {info.serve}"
    for problem in info.problems:
        yield f"  problem: {problem}"


def lines_of_advice(advice: Advice, devices: DeviceGroup, load: Load) -> Iterator[str]:
    yield (
        f"  on {devices} ({gib(int(devices.usable_bytes))} each for a server), {load.requests} "
        f"requests of {load.context:,} tokens; least times of plain decoding, by bytes:"
    )
    names = ("engines", "weights", "KV tokens", "1 row", "all rows", "tokens/s", "flags of each")
    yield "  {:>7} {:>10} {:>12} {:>9} {:>9} {:>9}  {}".format(*names)
    for each in advice.choices:
        yield (
            f"  {each.replicas:>7} {gib(each.weight_bytes):>10} {each.kv_tokens:>12,} "
            f"{each.one_row_ms:>6.2f} ms {each.step_ms:>6.2f} ms {each.tokens_per_second:>9,.0f}  "
            f"{each.flags}"
        )
    rows = advice.fastest.rows
    yield f"  most tokens per second: {_named(advice.fastest)} --max-running-requests {rows}"
    yield f"  quickest single request: {_named(advice.quickest)}"


def _named(choice: Choice) -> str:
    engines = "one engine" if choice.replicas == 1 else f"{choice.replicas} engines, each"
    return f"{engines} with {choice.flags}"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"
