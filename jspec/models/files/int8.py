"""The form of int8 in config.json that is read: compressed-tensors' W8A8.

config_groups.*.weights              8 bits, symmetric, one scale per channel or tensor
config_groups.*.input_activations    8 bits, symmetric, quantized per token while it is served
"""

from __future__ import annotations

from typing import Any

from jspec.errors import ConfigError, shown
from jspec.files.json_files import Fields

FORMATS = ("int-quantized", "naive-quantized")
_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
_READ: dict[str, dict[str, tuple[Any, ...]]] = {
    "weights": {
        "num_bits": (8,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("channel", "tensor"),
        "dynamic": (False,),
    },
    "input_activations": {
        "num_bits": (8,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("token",),
        "dynamic": (True,),
    },
}
_WHY = (
    "of int8, symmetric weights with a scale per channel or tensor and activations quantized per "
    "token are all that is read"
)


def check_int8(table: Fields) -> None:
    """Raise ConfigError for another form of int8. table: compressed-tensors' config."""
    table.refuse("format", allowed=FORMATS, why=_WHY)
    groups = table.table("config_groups")
    for name in groups.values:
        for part, expected in _READ.items():
            _check(groups.table(name).table(part), part, expected)


def _check(fields: Fields, part: str, expected: dict[str, tuple[Any, ...]]) -> None:
    if not fields.values:
        raise ConfigError(f"{fields.path}: {part} is null; expected 8 bits of type 'int': {_WHY}")
    for key, allowed in expected.items():
        value = _DEFAULTS.get(key) if fields.get(key) is None else fields.get(key)
        if value not in allowed:
            raise ConfigError(
                f"{fields.path}: {key} of {part} is {shown(value)}; expected "
                f"{' or '.join(map(repr, allowed))}: {_WHY}"
            )
