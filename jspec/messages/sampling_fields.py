"""The declaration of sampling parameters: accepted values and device encoding.

`SamplingParams` declares its fields with `sampled(...)`; `table_of` collects them in
SAMPLING_FIELDS. The table determines the checks of a request, the names in the HTTP APIs, packing
(messages/sampling_rows.py), unpacking (device/batch.py) and neutral rows (device/state.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jspec.errors import RequestError, shown_json
from jspec.messages.plain_values import listed, plain, plain_items
from jspec.messages.step_options import StepOption

MAX_ID_CHARS = 10  # of a token id as text; bounds the cost of int()
_KEY = "sampling_field"  # in a dataclass field's metadata


class Accepts(Protocol):
    def check(self, name: str, value: Any) -> None:
        """Raise RequestError with the field, its value and the expected values."""


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int | None = None
    expected: str = ""  # for the error, if not the bounds

    def check(self, name: str, value: Any) -> None:
        limit = "" if self.high is None else f" and at most {self.high}"
        expected = self.expected or f"an integer of at least {self.low}{limit}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} is {shown_json(value)}; expected {expected}")
        is_high = self.high is not None and value > self.high
        if value < self.low or is_high:
            raise RequestError(f"{name} is {shown_json(value)}; expected {expected}")


@dataclass(frozen=True, slots=True)
class Number:
    """A number from low to high; low itself is accepted only if `with_low`."""

    low: float
    high: float
    with_low: bool = True

    def check(self, name: str, value: Any) -> None:
        expected = f"a number in ({self.low:g}, {self.high:g}]"
        if self.with_low:
            expected = f"a number from {self.low:g} to {self.high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name} is {shown_json(value)}; expected {expected}")
        is_inside = self.low <= value <= self.high  # NaN is not
        if not is_inside or (value == self.low and not self.with_low):
            raise RequestError(f"{name} is {str(value).removesuffix('.0')}; expected {expected}")


@dataclass(frozen=True, slots=True)
class Flag:
    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise RequestError(f"{name} is {shown_json(value)}; expected true or false")


@dataclass(frozen=True, slots=True)
class Switch(Flag):
    """True or false, or the strings "on" and "off"."""

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise RequestError(
                f"{name} is {shown_json(value)}; expected true, false, 'on' or 'off'"
            )

    @staticmethod
    def read(value: Any) -> Any:
        return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Texts:
    """A tuple of at most `most` non-empty Unicode strings, `most_chars` characters in all."""

    most: int
    most_chars: int

    def check(self, name: str, value: Any) -> None:
        _check_len(name, value, most=self.most)
        for text in value:
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name} holds {shown_json(text)}; expected non-empty strings")
            try:
                text.encode("utf-8")  # JSON can spell half a surrogate pair, UTF-8 cannot
            except UnicodeEncodeError:
                raise RequestError(
                    f"{name} holds a lone surrogate; expected Unicode text"
                ) from None
        num_chars = sum(map(len, value))
        if num_chars > self.most_chars:
            raise RequestError(
                f"{name} has {num_chars} characters; expected at most {self.most_chars} in all "
                "strings"
            )


@dataclass(frozen=True, slots=True)
class Source:
    """A non-empty text of at most `most_chars` characters."""

    most_chars: int
    as_json: tuple[str, ...] = ()  # JSON types that are accepted too and converted to text

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, str) or not value:
            also = "".join(f", or JSON's {kind}" for kind in self.as_json)
            raise RequestError(
                f"{name} is {shown_json(value)}; expected a text that is not empty{also}"
            )
        if len(value) > self.most_chars:
            raise RequestError(
                f"{name} has {len(value)} characters; expected at most {self.most_chars}"
            )

    def read(self, name: str, value: Any) -> Any:
        kind = "boolean" if isinstance(value, bool) else "object"
        if not isinstance(value, Mapping | bool) or kind not in self.as_json:
            return value
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{name} is no JSON object: {error}") from None


@dataclass(frozen=True, slots=True)
class Integers:
    each: Integer
    most: int

    def check(self, name: str, value: Any) -> None:
        _check_len(name, value, most=self.most)
        for item in value:
            self.each.check(name, item)


@dataclass(frozen=True, slots=True)
class Biases:
    """A tuple of at most `most` (token id, number) pairs with distinct ids."""

    ids: Integer
    bias: Number
    most: int

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in value
        ):
            raise RequestError(f"{name} is {shown_json(value)}; expected (token id, number) pairs")
        _check_len(name, value, most=self.most)
        for token_id, bias in value:
            self.ids.check(f"a token id of {name}", token_id)
            self.bias.check(f"{name} of token {token_id}", bias)
        if len({token_id for token_id, _ in value}) < len(value):
            raise RequestError(f"{name} names a token id twice; expected each once")

    def read(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(plain_items(x) if isinstance(x, tuple) else x for x in value)
        if not isinstance(value, Mapping):
            raise RequestError(
                f"{name} is {shown_json(value)}; expected an object of token ids and numbers"
            )
        return tuple((_token_id(name, key), plain(bias)) for key, bias in value.items())


def _token_id(name: str, key: Any) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MAX_ID_CHARS:
        return int(key)
    if type(number := plain(key)) is int:
        return number
    raise RequestError(f"{name} names {shown_json(key)}; expected a token id")


def _check_len(name: str, values: Any, *, most: int) -> None:
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} items; expected at most {most}")


@dataclass(frozen=True, slots=True)
class Row:
    """Encoding of a parameter in a row of the device's SamplingBatch."""

    dtype: Any  # 32 bits wide, since all are sent as i32 bits
    shape: tuple[int, ...] = ()
    neutral: float | Callable[[int], int] = 0  # if absent; a function if it depends on V
    # (request, V) -> the value or values, where missing ones stay neutral. None: send it unchanged.
    encode: Callable[[Any, int], Any] | None = None
    name: str = ""  # field of SamplingBatch, if not the parameter's own

    def neutral_value(self, vocab_size: int) -> float:
        return self.neutral(vocab_size) if callable(self.neutral) else self.neutral


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # the table is hashed once per prefill
class SamplingField:
    name: str
    default: Any  # if it is None, None is accepted too
    accepts: Accepts
    openai: str  # OpenAI's name, if different
    needs: StepOption | None  # step option that a value other than the default needs
    row: Row | None  # None: only the host uses the parameter

    def read(self, value: Any) -> Any:
        """Convert a JSON or Python value to the parameter's type.

        For a tuple parameter, a list or array becomes a tuple, one string a tuple of it, and null
        the default. Numbers of other libraries become Python numbers. Raises RequestError for a
        value that is no list where a list is expected.
        """
        if isinstance(self.accepts, Source):
            return self.accepts.read(self.name, value)
        value = plain(listed(value))
        if not isinstance(self.default, tuple):
            return self.accepts.read(value) if isinstance(self.accepts, Switch) else value
        if isinstance(self.accepts, Biases):
            return self.accepts.read(self.name, value)
        if isinstance(value, str) and isinstance(self.accepts, Texts):
            return (value,)
        if value is None:
            return self.default
        if not isinstance(value, list | tuple):
            of_texts = isinstance(self.accepts, Texts)
            expected = "a string or a list of strings" if of_texts else "a list of integers"
            raise RequestError(f"{self.name} is {shown_json(value)}; expected {expected}")
        return plain_items(value)

    def check(self, value: Any) -> None:
        if value is not None or self.default is not None:
            self.accepts.check(self.name, value)


SamplingTable = tuple[SamplingField, ...]


def sampled(
    default: Any,
    accepts: Accepts,
    *,
    openai: str = "",
    needs: StepOption | None = None,
    row: Row | None = None,
) -> Any:
    declared = {
        "default": default,
        "accepts": accepts,
        "openai": openai,
        "needs": needs,
        "row": row,
    }
    return dataclasses.field(default=default, metadata={_KEY: declared})


def table_of(params: type) -> SamplingTable:
    return tuple(
        SamplingField(
            name=field.name,
            **{**field.metadata[_KEY], "openai": field.metadata[_KEY]["openai"] or field.name},
        )
        for field in dataclasses.fields(params)
        if _KEY in field.metadata
    )
