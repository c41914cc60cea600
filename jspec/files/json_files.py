"""JSON files of checkpoints, read within limits and with checked types.

A checkpoint is untrusted: a path may be a pipe that never ends; a file may be of any size, nested
without limit, or have NaN as a size. All of that is a CheckpointError.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jspec.errors import CheckpointError, ConfigError, reason_of, shown

MIB = 2**20
MAX_CONFIG_BYTES = 16 * MIB  # the largest known one, with a chat template, is well below 1 MiB
# float32's normal range: other numbers would become 0 or inf
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_TOO_LONG = re.compile(r"limit \((\d+) digits\) for integer .* has (\d+) digits")
# Far above every existing model, and low enough to prevent overflows and minute-long checks.
MOST = {
    "vocab_size": 2**24,
    "draft_vocab_size": 2**24,
    "hidden_size": 2**20,
    "target_hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    # other families' names of heads and widths
    "num_attention_groups": 2**16,
    "swa_num_key_value_heads": 2**16,
    "v_head_dim": 2**16,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 2**16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 2**20),
    **dict.fromkeys(("index_head_dim", "index_n_heads"), 2**16),
    "index_topk_freq": 1024,
    "moe_intermediate_size": 2**22,
    "share_expert_dim": 2**22,
    "shared_expert_intermediate_size": 2**22,
    # Gemma 4, and its assistants
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), 2**16),
    **dict.fromkeys(("hidden_size_per_layer_input", "backbone_hidden_size"), 2**20),
    "num_kv_shared_layers": 1024,
    **dict.fromkeys(("top_k_experts", "centroid_intermediate_top_k"), 4096),
    "num_centroids": 2**20,
    # gated delta nets
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2**16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 2**16),
    "linear_conv_kernel_dim": 1024,
    "full_attention_interval": 1024,
    # per layer; experts may have own tensors (models/files/checkpoint.py bounds their number)
    **dict.fromkeys(("num_experts", "num_local_experts"), 4096),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), 4096),
    **dict.fromkeys(("n_group", "topk_group"), 4096),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k"), 4096),
    "n_shared_experts": 256,
    # drafts
    "num_nextn_predict_layers": 64,
    "mtp_num_hidden_layers": 64,
    "num_aux_hidden_states": 1024,
}
_MOST_ELSEWHERE = 2**31 - 1


@contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Add the file's path to a ConfigError raised inside, unless it has it already."""
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


def exists(path: Path) -> bool:
    """Return whether the path exists. Raises CheckpointError if the system cannot tell."""
    try:
        return path.exists()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {reason_of(error)}") from error


def check_regular(path: Path) -> int:
    """Return a regular file's size. Raises CheckpointError for others, since a pipe can block."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: cannot be read: it is not a regular file")
    return found.st_size


def read_text(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    too_large = f"{path}: is larger than {max_bytes} bytes; expected at most that"
    if check_regular(path) > max_bytes:
        raise CheckpointError(too_large)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)  # it may have grown meanwhile
        if len(data) > max_bytes:
            raise CheckpointError(too_large)
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: {utf8_fault(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_object(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    text = read_text(path, max_bytes=max_bytes)
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: it is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {json_fault(error)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}; expected a JSON object")
    return values


def utf8_fault(error: UnicodeDecodeError) -> str:
    """Return the message for bytes that are not UTF-8, to follow their name."""
    return f"is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def json_of(data: bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON bytes in UTF-8. json.loads would accept UTF-16 and half characters too.

    Raises ValueError, for `json_fault`, and RecursionError.
    """
    return json.loads(data.decode("utf-8-sig"), parse_constant=parse_constant)


def json_fault(error: ValueError) -> str:
    """Return the message for an error of `json_of`, to follow the text's name."""
    if isinstance(error, UnicodeDecodeError):
        return utf8_fault(error)
    found = long_integer(error)
    return f"cannot be read as JSON: it has {found}" if found else f"is not JSON: {error}"


def long_integer(error: Exception) -> str:
    """Describe the integer that has too many digits, if the error is about one; else ""."""
    found = _TOO_LONG.search(str(error))
    return f"an integer of {found[2]} digits; expected at most {found[1]}" if found else ""


def read_fields(path: Path) -> Fields:
    return Fields(path, read_object(path))


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and its file. null counts as absent. Raises CheckpointError for wrong types."""

    path: Path
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer, at most MOST[name]."""
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._unfit(name, value, "a positive integer")
        most = MOST.get(name, _MOST_ELSEWHERE)
        if value > most:
            raise self._unfit(name, value, f"an integer of at most {most}")
        return value

    def token_id(self, name: str, value: Any) -> int:
        """Check `value`, the field's value or an item of its list, as a token id."""
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MOST_ELSEWHERE:
            raise self._unfit(name, self.get(name), "an integer or a list of them")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive finite number that float32 can represent."""
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self._unfit(name, value, "a positive number")
        if not _SMALLEST <= value <= _LARGEST or not math.isfinite(value):
            raise self._unfit(name, value, "a positive number that float32 can hold")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, bool):
            raise self._unfit(name, value, "true or false")
        return value

    def table(self, name: str) -> Fields:
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self._unfit(name, value, "an object")
        return Fields(self.path, value)

    def strings(self, name: str) -> tuple[str, ...]:
        value = [] if self.get(name) is None else self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._unfit(name, value, "a list of strings")
        return tuple(value)

    def architecture(self) -> str:
        """Return the first architecture; the others name further readers of the checkpoint."""
        names = self.strings("architectures")
        if not names:
            raise self._unfit("architectures", self.get("architectures"), "a list of names")
        return names[0]

    def refuse(self, name: str, *, allowed: tuple[Any, ...], why: str) -> None:
        """Raise ConfigError unless the field is absent or has one of the `allowed` values."""
        value = self.get(name)
        if value is not None and value not in allowed:
            expected = " or ".join(repr(item) for item in allowed) or "no such key"
            raise ConfigError(f"{self.path}: {name} is {shown(value)}; expected {expected}: {why}")

    def _unfit(self, name: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} is {shown(value)}; expected {expected}")
