"""jspec: exact speculative decoding for language-model serving in JAX.

Public names load lazily, so that the host half of the package imports without jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.config.engine_args import EngineArgs as EngineArgs
    from jspec.errors import CheckpointError as CheckpointError
    from jspec.errors import ConfigError as ConfigError
    from jspec.errors import EngineClosedError as EngineClosedError
    from jspec.errors import JspecError as JspecError
    from jspec.errors import QueueFullError as QueueFullError
    from jspec.errors import QueueTimeoutError as QueueTimeoutError
    from jspec.errors import RequestError as RequestError
    from jspec.messages.request import SamplingParams as SamplingParams
    from jspec.serving.engine import Engine as Engine

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
_MODULES = {
    "Engine": "serving.engine",
    "EngineArgs": "config.engine_args",
    "SamplingParams": "messages.request",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    module = importlib.import_module(f"jspec.{_MODULES.get(name, 'errors')}")
    return getattr(module, name)
