"""Output files of commands. A system error becomes an OutputError that names the path.

A full disk, a quota or a missing permission is not a bug: one line gives the file and the reason,
and no partial file remains.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from jspec.errors import OutputError, reason_of


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises OutputError for what the system refuses meanwhile."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error)}") from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`, which becomes it at the end, or is removed on an error.

    A device, a pipe (/dev/stdout) and the like are written to as they are.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            yield path
            return
        path = path.resolve()  # a link stays one
        part = path.with_name(f"{path.stem}.part{path.suffix}")
        try:
            yield part
            part.replace(path)
        except BaseException:
            remove(part)
            raise


def write_text(path: Path, text: str) -> None:
    """Writes it whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Removes a file or a folder, whatever is left of it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
