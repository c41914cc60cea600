"""The final bundles of a kernel, as libtpu lists them: loops, and the instructions of each bundle.

A bundle is what a core issues in one cycle. Waits for copies and for the results of products,
reductions and permutations have no bundles, so a loop's bundles are the fewest cycles of one pass.

In:  0x1ce LB: >>> { %s1 = sadd.s32 1, %s2 ;;  %v3 = vld [vmem:[%s4] ...] } /* Start region 834 */
Out: label LB, depth 3, two instructions, region 834 starts here
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:?\s*([> ]*)\{(.*)$")
_STARTS = re.compile(r"(?:Start/End empty region|Start region) (\d+)")
_ENDS = re.compile(r"End region (\d+)")
_LOCATION = re.compile(r'loc\("([^"]+)":(\d+)')


@dataclass(frozen=True, slots=True)
class Bundle:
    """label: LB begins a loop's body, PF and CT are where a branch goes. depth: loops around it."""

    label: str
    depth: int
    instructions: tuple[str, ...]
    starts: tuple[str, ...]  # regions
    ends: tuple[str, ...]
    location: str  # the Python line, if any

    @property
    def has_product(self) -> bool:
        return any("vmatmul" in x or "vmatpush" in x or "vmatprep" in x for x in self.instructions)

    @property
    def has_branch(self) -> bool:
        return any(re.match(r"(%\S+ = )?sbr", x) for x in self.instructions)


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop's body. own: bundles of it in no loop inside it; products: those that use the matrix
    units."""

    start: int
    depth: int
    own: int
    products: int
    vectors: int  # instructions of the vector units in `own`


def read(path: Path) -> list[Bundle]:
    """Read a listing of final bundles."""
    lines: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if _LINE.match(line):
            lines.append(line)
        elif lines:  # a comment within a bundle may have several lines
            lines[-1] += " " + line
    return [_bundle(line) for line in lines]


def _bundle(line: str) -> Bundle:
    head = _LINE.match(line)
    assert head is not None
    body, _, regions = head[3].rpartition("}")
    location = _LOCATION.search(body)
    texts = (x.strip() for x in re.sub(r"/\*.*?\*/", "", body).split(";;"))
    return Bundle(
        label=head[1] or "",
        depth=head[2].count(">"),
        instructions=tuple(x for x in texts if x),
        starts=tuple(_STARTS.findall(regions)),
        ends=tuple(_ENDS.findall(regions)),
        location=f"{Path(location[1]).name}:{location[2]}" if location else "",
    )


def depths(bundles: Sequence[Bundle]) -> list[int]:
    """Return the depth of each bundle. The listing omits it in the last slot after a branch."""
    found: list[int] = []
    for bundle in bundles:
        is_slot = bundle.depth == 0 and found and not bundle.label
        found.append(found[-1] if is_slot else bundle.depth)
    return found


def loops(bundles: Sequence[Bundle]) -> Iterator[Loop]:
    """Yield each loop, the inner ones first."""
    depth = depths(bundles)
    for start in sorted(
        (i for i, x in enumerate(bundles) if x.label == "LB"), key=lambda i: -depth[i]
    ):
        end = start + 1
        while (
            end < len(bundles)
            and depth[end] >= depth[start]
            and not (bundles[end].label == "LB" and depth[end] == depth[start])
        ):
            end += 1
        own = [
            x
            for x, at in zip(bundles[start:end], depth[start:end], strict=True)
            if at == depth[start]
        ]
        yield Loop(
            start=start,
            depth=depth[start],
            own=len(own),
            products=sum(x.has_product for x in own),
            vectors=sum(is_vector(text) for x in own for text in x.instructions),
        )


def is_vector(text: str) -> bool:
    return re.match(r"(%\S+ = )?v", text) is not None and "vsyncadd" not in text


def inner_loop(bundles: Sequence[Bundle]) -> Loop | None:
    """Return the loop that does the kernel's work: the one whose body, without the loops inside
    it, has the most products, or else the most vector instructions."""
    found = list(loops(bundles))
    if not found:
        return None
    return max(found, key=lambda x: (x.products, x.vectors))
