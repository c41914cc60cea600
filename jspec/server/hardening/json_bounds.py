"""How much structure a JSON text may have before anybody parses it.

json.loads keeps Python's lock while it works, and what it makes takes up to 20 times the text's
length in memory: a body of a few megabytes can stop every stream for a second. What costs is not
the text in strings, which may be as long as a body, but lists, objects, and the members of both.
These are counted here outside of strings, a piece at a time, so that other threads run between.
"""

from __future__ import annotations

from collections.abc import Iterator

from jspec.errors import RequestError

# More than any batch has: a list or object a prompt, and one for how it is sampled.
MAX_CONTAINERS = 262_144
MAX_KEYS = 524_288  # a tenth of a second
MAX_VALUES = 4_194_304  # a quarter of one
BOUNDS = (
    (b"[{", MAX_CONTAINERS, "lists and objects"),
    (b":", MAX_KEYS, "keys"),
    (b",", MAX_VALUES, "values"),
)
PIECE = 1 << 18  # bytes


def check_structure(body: bytes) -> None:
    """Raises RequestError for a body with more lists, keys or values than BOUNDS has."""
    if all(_count(body, signs) <= most for signs, most, _ in BOUNDS):
        return  # strings included
    found = [0] * len(BOUNDS)
    for outside in outside_of_strings(body):
        for i, (signs, most, what) in enumerate(BOUNDS):
            found[i] += _count(outside, signs)
            if found[i] > most:
                raise RequestError(
                    f"the request body has more than {most} {what}; expected at most {most}"
                )


def outside_of_strings(body: bytes, *, piece_size: int = PIECE) -> Iterator[bytes]:
    """What is not in quotes, a part for each piece of the body.

    In:  ["a\\",[", 1], in pieces of 4    Out: `[`, ``, `, 1]`
    """
    is_inside = is_escaped = False
    for at in range(0, len(body), piece_size):
        piece = body[at : at + piece_size]
        if is_escaped:  # by a backslash that ended the piece before
            piece = piece[1:]
        piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        is_escaped = piece.endswith(b"\\")
        parts = piece.split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _count(text: bytes, signs: bytes) -> int:
    return sum(text.count(sign) for sign in signs)
