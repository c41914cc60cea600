"""The types of the matrix products in compiled text."""

from __future__ import annotations

from collections import Counter

from tests.engine.compiled_text import instructions


def product_types(text: str) -> dict[str, int]:
    """Return the number of products by their operands' and result's types: "s8 s8 s32"."""
    known = list(instructions(text))
    types = {(x.computation, x.name): x.types for x in known}
    found: Counter[str] = Counter()
    for each in known:
        if each.opcode in ("convolution", "dot"):
            operands = [types.get((each.computation, name), ()) for name in each.operands[:2]]
            found[" ".join(x[0].dtype if x else "?" for x in (*operands, each.types))] += 1
    return dict(found)
