"""A digest of the code that step programs are traced from: the modules that the step functions
import, directly or indirectly, without docstrings and comment lines."""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
# Modules whose functions are traced or decide what is traced.
ROOTS = ("engine.programs.compilation", "pallas_kernels.bundles", "speculative.drafters.registry")
IMPORTED_AT = time.time()  # a newer source is not the code that this process runs

# A statement that starts with three quotes is a docstring everywhere in the package (a test checks
# this).
_PROSE = re.compile(
    r'^[ \t]*(?:r?"""(?:[^"\\]|\\.|"(?!""))*"""[ \t]*\n|#[^\n]*\n|\n)', re.MULTILINE
)
_TYPES_ONLY = re.compile(r"^if TYPE_CHECKING:[^\n]*\n(?:[ \t]+[^\n]*\n)+", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*from jspec\.?([\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


def code_of(source: str) -> str:
    """Return `source` without docstrings, comment lines, empty lines and type-only imports."""
    return _TYPES_ONLY.sub("", _PROSE.sub("", source))


def imports_of(code: str) -> Iterator[str]:
    """Yield dotted names below `jspec` that may be modules which `code` imports."""
    for package, names in _IMPORT.findall(code):
        yield package
        for name in re.findall(r"\w+", names):
            yield f"{package}.{name}".lstrip(".")


@functools.lru_cache(maxsize=1024)
def _read(path: Path, changed_ns: int) -> tuple[bytes, tuple[str, ...]]:
    del changed_ns
    code = code_of(path.read_text(encoding="utf-8"))
    return hashlib.sha256(code.encode()).digest(), tuple(imports_of(code))


def sources_digest(package: Path = PACKAGE) -> str | None:
    """Return the digest of the sources as they are on disk now; None without source files (a zip),
    or if one is newer than this process's imports."""
    found: dict[str, bytes] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        path = package.joinpath(*name.split(".")).with_suffix(".py")
        if name in found or not path.is_file():
            continue
        changed = path.stat()
        if changed.st_mtime > IMPORTED_AT:
            return None
        found[name], imported = _read(path, changed.st_mtime_ns)
        waiting.extend(imported)
    if not found:
        return None
    whole = hashlib.sha256()
    for name, digest in sorted(found.items()):
        whole.update(name.encode() + b"\n" + digest)
    return whole.hexdigest()
