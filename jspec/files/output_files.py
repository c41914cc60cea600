"""Output files of commands. A system error becomes an OutputError that names the path."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from jspec.errors import OutputError, reason_of


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error)}") from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` at the end or removed on an error.

    A device or a pipe (/dev/stdout) is written directly.
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
    """Write the whole text or nothing. Raises OutputError."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
