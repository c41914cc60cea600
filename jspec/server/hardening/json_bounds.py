"""Bounds on the structure of a JSON text, checked before parsing.

json.loads holds the GIL and takes up to 20 times the text's length in memory. Lists, objects and
their members are therefore counted first, outside of strings, in pieces, so that other threads run
in between.
"""

from __future__ import annotations

from collections.abc import Iterator

from jspec.errors import RequestError

# More than any batch needs: a list or object per prompt, and one for its sampling parameters.
MAX_CONTAINERS = 262_144
MAX_KEYS = 524_288  # 0.1 s of parsing
MAX_VALUES = 4_194_304  # 0.25 s of parsing
BOUNDS = (
    (b"[{", MAX_CONTAINERS, "lists and objects"),
    (b":", MAX_KEYS, "keys"),
    (b",", MAX_VALUES, "values"),
)
PIECE = 1 << 18  # bytes


def check_structure(body: bytes) -> None:
    """Raise RequestError for a body with more lists, keys or values than BOUNDS."""
    if all(_count(body, signs) <= most for signs, most, _ in BOUNDS):
        return  # even if strings are counted
    found = [0] * len(BOUNDS)
    for outside in outside_of_strings(body):
        for i, (signs, most, what) in enumerate(BOUNDS):
            found[i] += _count(outside, signs)
            if found[i] > most:
                raise RequestError(
                    f"the request body has more than {most} {what}; expected at most {most}"
                )


def outside_of_strings(body: bytes, *, piece_size: int = PIECE) -> Iterator[bytes]:
    """Yield the text outside of strings, one part per piece of the body.

    In:  ["a\\",[", 1], in pieces of 4    Out: `[`, ``, `, 1]`
    """
    is_inside = is_escaped = False
    for at in range(0, len(body), piece_size):
        piece = body[at : at + piece_size]
        if is_escaped:  # by a backslash at the end of the previous piece
            piece = piece[1:]
        piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        is_escaped = piece.endswith(b"\\")
        parts = piece.split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _count(text: bytes, signs: bytes) -> int:
    return sum(text.count(sign) for sign in signs)
