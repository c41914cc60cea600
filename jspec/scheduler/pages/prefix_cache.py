"""A prefix tree of pages, shared by all rows with a common prefix.

An edge is one page. Its key is the page's own tokens and the `lookahead` tokens after them, because
a drafter's state for a token may depend on later tokens (EAGLE's slot i is computed from token i +
1). So a page fits only texts that continue like its writer's. The path to a node is its prefix.

    worked example: page_size 2, lookahead 1, a text 5 6 7 8 9 in pages 11, 12 and a part of 13
    root --(5 6 7)--> page 11 --(7 8 9)--> page 12
    5 6 7 8 9 4 finds 11 and 12; 5 6 7 8 3 finds 11 alone: page 12 was made with 9 after it

A node has one record for each cache space, which the tree does not interpret: a page of the full
space or of a window, or 0 for none. A row may start after a node if every space can serve a start
there:

    page_size 2, window 4, a text of four pages, of which the window space has the second and third
    after page 2  the first query, at 4, sees 1..4: pages 1 and 2, and page 1 is missing
    after page 3  the first query, at 6, sees 3..6: pages 2 and 3: a row may start here
    after page 4  page 4 is missing

Nodes without records, children and rows are removed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

Ids = tuple[int, ...]


class Node:
    """A page end of texts with a common prefix. The root has depth 0 and no records."""

    __slots__ = (
        "children",
        "depth",
        "key",
        "num_users",
        "parent",
        "records",
        "siblings",
        "sought",
    )

    def __init__(
        self,
        parent: Node | None,
        key: Hashable,
        siblings: dict[Hashable, Node],
        *,
        num_spaces: int,
    ) -> None:
        self.parent = parent
        self.key = key
        self.siblings = siblings  # children of the parent, or the roots of all namespaces
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Hashable, Node] = {}
        self.records = [0] * num_spaces  # by space id; 0: none
        # num_users: rows whose text continues after this node. Bit i of sought: a text ended or
        # diverged where space i needs this node's record.
        self.num_users = self.sought = 0
        siblings[key] = self

    def path(self) -> Iterator[Node]:
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def prune(self) -> None:
        """Remove this node and those before it, as far as nothing needs them."""
        node: Node | None = self
        while node and not (node.num_users or node.children or any(node.records)):
            node.siblings.pop(node.key, None)
            node = node.parent


class RecordSpace(Protocol):
    """A cache space, which owns one record of each node, as the tree uses it."""

    @property
    def version(self) -> int:
        """A number that changes whenever a node gains or loses a record."""

    def last_start(self, path: Sequence[Node], depth: int) -> int:
        """Return the largest depth up to `depth` on a path after which a row may start."""

    def seek(self, node: Node) -> None:
        """Keep the records that a start after this node needs longer than others."""

    def forget(self, node: Node) -> None:
        """Drop the record of a node after which no row can start any more."""

    def withdraw(self, step: int) -> None:
        """Drop all records written by that step or later."""


class PrefixCache:
    """One tree per namespace. Texts of different namespaces share nothing."""

    def __init__(self, spaces: Sequence[RecordSpace], *, page_size: int, lookahead: int) -> None:
        self._spaces = spaces
        self._page_size = page_size
        self._lookahead = lookahead
        self._roots: dict[Hashable, Node] = {}

    @property
    def version(self) -> int:
        return sum(space.version for space in self._spaces)

    def num_full(self, num_known: int) -> int:
        """Return how many pages of a text have a key once num_known tokens are known."""
        return max(num_known - self._lookahead, 0) // self._page_size

    def match(self, namespace: Hashable, ids: Ids) -> list[Node]:
        """Return the nodes of a text, from the first page on. At least one token remains."""
        path: list[Node] = []
        node = self._roots.get(namespace)
        most = min(self.num_full(len(ids)), (len(ids) - 1) // self._page_size)
        while node is not None and len(path) < most:
            node = node.children.get(self._key(ids, len(path)))
            if node is not None:
                path.append(node)
        return path

    def last_start(self, path: Sequence[Node]) -> int:
        """Return the largest depth on a path after which every space can serve a start."""
        depth, before = len(path), -1
        while depth != before:
            before = depth
            for space in self._spaces:
                depth = space.last_start(path, depth)
        return depth

    def root(self, namespace: Hashable) -> Node:
        """Return the root of a tree, made if missing; it stays while it is used."""
        found = self._roots.get(namespace)
        return found or Node(None, namespace, self._roots, num_spaces=len(self._spaces))

    def extend(self, last: Node, ids: Ids, *, known: int, begin: int = 0) -> Node:
        """Return the node after `known` tokens of a text, adding missing nodes. last: a node of the
        text. ids: the text from token `begin` on, which is not after `last`."""
        node = last
        while node.depth < self.num_full(known):
            key = self._key(ids, node.depth, begin)
            found = node.children.get(key)
            node = found or Node(node, key, node.children, num_spaces=len(self._spaces))
        return node

    def seek(self, node: Node) -> None:
        for space in self._spaces:
            space.seek(node)

    def forget(self, node: Node) -> None:
        for space in self._spaces:
            space.forget(node)

    def withdraw(self, step: int) -> None:
        for space in self._spaces:
            space.withdraw(step)

    def _key(self, ids: Ids, index: int, begin: int = 0) -> Hashable:
        start = index * self._page_size - begin
        return ids[start : start + self._page_size + self._lookahead]
