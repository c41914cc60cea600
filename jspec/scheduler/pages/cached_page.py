"""Pages in the prefix cache: nodes of the tree (full space), and attached window pages."""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class CachedPage:
    """A page of the full space; its parents are the pages before it.

    The root of a tree has page 0 and depth 0.

    depth: pages from the root up to and including this one.
    num_users: rows that use it or a page after it.
    num_doubles: of these rows, those whose own page with the same tokens is another one.
    writer: first step that may read it.
    windows: by window space, the page with the same tokens, or None.
    is_sought: a text ended at or shortly after this page, or diverged from the others there.
    """

    __slots__ = (
        "children",
        "depth",
        "is_sought",
        "is_withdrawn",
        "key",
        "last_used",
        "num_doubles",
        "num_users",
        "page",
        "parent",
        "windows",
        "writer",
    )

    def __init__(
        self,
        parent: CachedPage | None,
        key: Hashable,
        page: int,
        writer: int,
        *,
        num_windows: int = 0,
    ) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.writer = writer
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Hashable, CachedPage] = {}
        self.num_users = self.num_doubles = 0
        self.last_used = 0
        self.is_withdrawn = False
        self.is_sought = False
        self.windows: list[WindowPage | None] = [None] * num_windows

    def path(self) -> Iterator[CachedPage]:
        """Yield this page and those before it, backwards, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of the path, in order of position."""
        return tuple(node.page for node in self.path())[::-1]


class WindowPage:
    """A lent page of a window space.

    num_users: rows that use it.
    node: the page of the tree to which it is attached, or None.
    writer: first step that may read it there.
    """

    __slots__ = ("node", "num_users", "page", "writer")

    def __init__(self, page: int) -> None:
        self.page = page
        self.num_users = 1
        self.node: CachedPage | None = None
        self.writer = 0
