"""The Jinja sandbox of chat templates, which bounds range(), powers, products and padding widths,
but not nested loops."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

MAX_BITS = 10_000  # of an integer; Python prints some 14,000 at most
MAX_ITEMS = 1_000_000  # characters or items of a repetition
MAX_WIDTH = 100_000  # of padding; the sandbox's limit for range()
# Filters whose output size is given by a numeric argument.
_SIZED = ("batch", "center", "indent", "round", "slice", "tojson")
# A width or precision of six digits or more, or given as an argument.
_PERCENT = re.compile(r"%(?:\([^)]{0,99}\))?[-#0 +]*(?:\d{6}|\*|\d*\.(?:\d{6}|\*))")
_BRACES = re.compile(r"\{[^{}]{0,99}:[^{}]{0,99}?(?:\{|\d{6})")


class _Generation(jinja2.ext.Extension):
    """The block {% generation %}, which marks text for training; only its text is used."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own name and type)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, to_json: Callable[..., str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            # Both are needed, or Jinja evaluates constants at compile time.
            optimized=False,
            finalize=_as_it_is,
        )
        del self.globals["lipsum"]  # generates any number of words
        self.filters["tojson"] = to_json
        self.filters |= {name: _sized(name, self.filters[name]) for name in _SIZED}
        self.filters["format"] = _format

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS and abs(left) > 1:
                raise _error("a power that is large", f"a number of at most {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _check_text(left, _PERCENT)
        return super().call_binop(context, operator, left, right)

    def call(
        __self,  # noqa: N805  (as in Jinja: no argument of a template has these names)
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(method, types.BuiltinMethodType) and isinstance(owner, str | bytes | int):
            if isinstance(owner, str) and method.__name__ in ("format", "format_map"):
                _check_text(owner.replace("{{", "").replace("}}", ""), _BRACES)
            else:
                _check_widths(method.__name__, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


@jinja2.pass_context
def _as_it_is(_context: jinja2.runtime.Context, value: Any) -> Any:
    """Return `value`. Functions that take the context are not called at compile time."""
    return value


def _sized(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    first = 2 if hasattr(made, "jinja_pass_arg") else 1  # skip the value, which may be large

    @functools.wraps(made)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_widths(name, (*args[first:], *kwargs.values()))
        return made(*args, **kwargs)

    return bounded


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_text(str(value), _PERCENT)
    if args and kwargs:
        raise jinja2.TemplateError("format has arguments with and without names; expected one kind")
    return str(value) % (kwargs or args)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise _error("a product", f"a number of at most {MAX_BITS} bits")
        return
    if isinstance(left, int):
        left, right = right, left
    is_repeated = isinstance(right, int) and isinstance(left, str | bytes | list | tuple)
    if is_repeated and len(left) * right > MAX_ITEMS:
        raise _error(f"{len(left)} characters or items many times", f"at most {MAX_ITEMS}")


def _check_text(text: str, pattern: re.Pattern[str]) -> None:
    found = pattern.search(text)
    if found is not None:
        expected = f"a width of at most {MAX_WIDTH - 1}, written out"
        raise _error(f"the format {found[0][:40]!r}", expected)


def _check_widths(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise _error(f"{name} with a number that is large", f"at most {MAX_WIDTH}")


def _error(found: str, expected: str) -> jinja2.exceptions.SecurityError:
    return jinja2.exceptions.SecurityError(f"it has {found}; expected {expected}")
