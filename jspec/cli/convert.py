"""`jspec convert DIR OUT --to FORMAT`: one directory of weights into another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jspec.cli.flags import FlagParser
from jspec.engine.interrupts import interruptible


def run_convert(argv: Sequence[str]) -> int:
    """Loads jax only where orbax is read or written."""
    with interruptible():
        from jspec.models.files.convert import Format, convert

    parser = FlagParser(
        prog="jspec convert",
        allow_abbrev=False,
        description="Writes the weights of a checkpoint in another format, names, shapes and types "
        "as they are, and copies its other files. OUT is served by --model-path as DIR is, on any "
        "number of devices.",
    )
    parser.add_argument("source", metavar="DIR", help="safetensors, pytorch_model.bin or orbax/")
    parser.add_argument("out", metavar="OUT", help="a directory that is new or empty")
    parser.add_argument(
        "--to",
        required=True,
        choices=[each.value for each in Format],
        help="what OUT shall have: model.safetensors, or a checkpoint of orbax in OUT/orbax",
    )
    options = parser.parse_args(argv)
    done = convert(Path(options.source), Path(options.out), Format(options.to))
    print(
        f"{options.out}: {done.num_tensors} tensors, {done.num_bytes / 2**20:.1f} MiB, as "
        f"{options.to}" + (f" in {done.num_files} files" if done.num_files > 1 else "")
    )
    return 0
