"""`jspec convert DIR OUT --to FORMAT`: convert a directory of weights to another format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jspec.cli.flags import FlagParser
from jspec.engine.interrupts import interruptible
from jspec.spec.weight_format import QUANTIZATIONS


def run_convert(argv: Sequence[str]) -> int:
    """Convert a checkpoint; jax loads only if orbax is read or written."""
    with interruptible():
        from jspec.models.files.convert import Format, convert

    parser = FlagParser(
        prog="jspec convert",
        allow_abbrev=False,
        description="Convert a checkpoint's weights to another format, with the same names, shapes "
        "and types unless --quantization is given, and copy its other files. --model-path accepts "
        "OUT as it does DIR, on any number of devices.",
    )
    parser.add_argument(
        "source", metavar="DIR", help="checkpoint with safetensors, pytorch_model.bin or orbax/"
    )
    parser.add_argument("out", metavar="OUT", help="new or empty directory")
    parser.add_argument(
        "--to",
        required=True,
        choices=[each.value for each in Format],
        help="format of OUT: model.safetensors, or an orbax checkpoint in OUT/orbax",
    )
    parser.add_argument(
        "--quantization",
        choices=tuple(QUANTIZATIONS),
        help="quantize a target's layers to fp8 or int8, a scale per output channel, in the layout "
        "of compressed-tensors, which SGLang, vLLM and transformers read, too",
    )
    options = parser.parse_args(argv)
    done = convert(
        Path(options.source),
        Path(options.out),
        Format(options.to),
        quantize=QUANTIZATIONS.get(options.quantization),
    )
    print(
        f"{options.out}: {done.num_tensors} tensors, {done.num_bytes / 2**20:.1f} MiB, as "
        f"{options.to}" + (f" in {done.num_files} files" if done.num_files > 1 else "")
    )
    return 0
