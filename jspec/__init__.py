"""jspec: exact speculative decoding for language-model serving in JAX.

Public names load lazily, so that the host half of the package imports without jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.api import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from jspec.api import Engine

        return Engine
    raise AttributeError(f"module 'jspec' has no attribute {name!r}")
