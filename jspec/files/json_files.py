"""JSON files that others wrote: read within bounds, and their fields with their types checked.

A checkpoint is foreign data. A path may lead to a pipe that never ends, a file may be of any size,
nested without end, or hold NaN where a size belongs. All of it is a CheckpointError that names the
file and what was found, before anything is built from it.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jspec.errors import CheckpointError, ConfigError, reason_of

MIB = 2**20
MAX_CONFIG_BYTES = 16 * MIB  # the largest known, with a chat template in it, has well below one
# float32's normal range: outside it a number would be 0 or inf where it is used
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_TOO_LONG = re.compile(r"limit \((\d+) digits\) for integer .* has (\d+) digits")
_SHOWN = 200  # characters of a value in a message
# Far above every model there is, and low enough that nothing overflows or takes minutes.
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
    # of heads and widths under the names of some families
    "num_attention_groups": 2**16,
    "swa_num_key_value_heads": 2**16,
    "v_head_dim": 2**16,
    "moe_intermediate_size": 2**22,
    "share_expert_dim": 2**22,
    # of a layer; each expert may have names of its own (models/files/checkpoint.py bounds all)
    **dict.fromkeys(("num_experts", "num_local_experts"), 4096),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), 4096),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k"), 4096),
    "n_shared_experts": 256,
    # of drafts
    "num_nextn_predict_layers": 64,
    "mtp_num_hidden_layers": 64,
    "num_aux_hidden_states": 1024,
}
_MOST_ELSEWHERE = 2**31 - 1


@contextmanager
def in_file(path: Path) -> Iterator[None]:
    """A ConfigError of what is made from a file's values names the file, if it does not already."""
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


def exists(path: Path) -> bool:
    """Whether something has this path. Raises CheckpointError where the system does not say: for a
    name that is too long, or a directory that may not be read."""
    try:
        return path.exists()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {reason_of(error)}") from error


def check_regular(path: Path) -> int:
    """The size in bytes of a regular file (or of what a link leads to).

    Raises CheckpointError where there is none, or a directory, a pipe, a socket, a device: opening
    one of those can wait for ever.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: cannot be read: it is not a regular file")
    return found.st_size


def read_text(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """The UTF-8 text of a regular file of at most `max_bytes`. Raises CheckpointError."""
    too_large = f"{path}: is larger than {max_bytes} bytes; expected at most that"
    if check_regular(path) > max_bytes:
        raise CheckpointError(too_large)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)  # it may have grown
        if len(data) > max_bytes:
            raise CheckpointError(too_large)
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_object(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object that a JSON file holds. Raises CheckpointError."""
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


def json_fault(error: ValueError) -> str:
    """What is wrong with a text of which json.loads raised this, after the text's name: it "is not
    JSON", or has an integer of more digits than Python converts, whose own words are about Python.
    """
    found = long_integer(error)
    return f"cannot be read as JSON: it has {found}" if found else f"is not JSON: {error}"


def long_integer(error: Exception) -> str:
    """The integer that has too many digits to be read, if that is what the error is about."""
    found = _TOO_LONG.search(str(error))
    return f"an integer of {found[2]} digits; expected at most {found[1]}" if found else ""


def read_fields(path: Path) -> Fields:
    """`read_object` as Fields."""
    return Fields(path, read_object(path))


def shown(value: object) -> str:
    """repr(value) for a message, cut where it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object and the file it came from; null counts as absent, types are checked.

    Raises CheckpointError naming the file, the field and its value.
    """

    path: Path
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer, at most what MOST says for its name."""
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._unfit(name, value, "a positive integer")
        most = MOST.get(name, _MOST_ELSEWHERE)
        if value > most:
            raise self._unfit(name, value, f"an integer of at most {most}")
        return value

    def token_id(self, name: str, value: Any) -> int:
        """`value` of the field, or one out of its list, as an id."""
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MOST_ELSEWHERE:
            raise self._unfit(name, self.get(name), "an integer or a list of them")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number that float32 can hold; not NaN, not infinite."""
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
        """The object under `name`, an empty one if it is absent."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self._unfit(name, value, "an object")
        return Fields(self.path, value)

    def strings(self, name: str) -> tuple[str, ...]:
        """The list of strings under `name`, none if it is absent."""
        value = [] if self.get(name) is None else self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._unfit(name, value, "a list of strings")
        return tuple(value)

    def architecture(self) -> str:
        """The first name: others say who else may read the checkpoint."""
        names = self.strings("architectures")
        if not names:
            raise self._unfit("architectures", self.get("architectures"), "a list of names")
        return names[0]

    def refuse(self, name: str, *, allowed: tuple[Any, ...], why: str) -> None:
        """ConfigError unless the field is absent or one of the `allowed` values."""
        value = self.get(name)
        if value is not None and value not in allowed:
            expected = " or ".join(repr(item) for item in allowed) or "no such key"
            raise ConfigError(f"{self.path}: {name} is {shown(value)}; expected {expected}: {why}")

    def _unfit(self, name: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} is {shown(value)}; expected {expected}")
