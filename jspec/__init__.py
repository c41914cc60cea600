"""jspec: exact speculative decoding for language-model serving in JAX.

Public names load lazily, so that the host half of the package imports without jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.api import Engine as Engine
    from jspec.core.engine_args import EngineArgs as EngineArgs
    from jspec.core.errors import CheckpointError as CheckpointError
    from jspec.core.errors import ConfigError as ConfigError
    from jspec.core.errors import EngineClosedError as EngineClosedError
    from jspec.core.errors import JspecError as JspecError
    from jspec.core.errors import QueueFullError as QueueFullError
    from jspec.core.errors import QueueTimeoutError as QueueTimeoutError
    from jspec.core.errors import RequestError as RequestError
    from jspec.core.request import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineArgs",
    "EngineClosedError",
    "JspecError",
    "QueueFullError",
    "QueueTimeoutError",
    "RequestError",
    "SamplingParams",
    "__version__",
]
_MODULES = {"Engine": "api", "EngineArgs": "core.engine_args", "SamplingParams": "core.request"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    module = importlib.import_module(f"jspec.{_MODULES.get(name, 'core.errors')}")
    return getattr(module, name)
