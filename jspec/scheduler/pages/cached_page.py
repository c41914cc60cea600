"""What the prefix cache remembers of a page: of the full space, whose pages are the tree, and of
the window spaces, whose pages lie beside those that hold the same tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class CachedPage:
    """A page of the full space and the path to it; the root of a tree has page 0 and depth 0.

    depth: pages from the root up to and including this one. num_users: rows that hold it or a page
    after it. num_doubles: of these rows, those that have another page with the same tokens.
    writer: the step from which on it may be read. windows: of each window space the page that holds
    the same tokens, None where there is none. is_sought: a text ended at this page, or a little
    after it, or began to differ from the others there.
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
        """This page and those before it, backwards, without the root."""
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

    num_users: rows that hold it. node: beside which page of the tree it is found; None: nowhere.
    writer: the step from which on it may be read there.
    """

    __slots__ = ("node", "num_users", "page", "writer")

    def __init__(self, page: int) -> None:
        self.page = page
        self.num_users = 1
        self.node: CachedPage | None = None
        self.writer = 0
