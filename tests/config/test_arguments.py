"""One declaration of an argument gives its check, its flag, its help and its docs row."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from jspec.cli.flag_table import FLAGS, GROUPS, Flag, FlagClass, FlagKind, flags_of
from jspec.config.arguments import Shorthand, argument, argument_of, check_arguments
from jspec.config.engine_args import EngineArgs
from jspec.errors import ConfigError
from jspec.server.server_args import ServerArgs

ARGUMENTS = (*fields(EngineArgs), *fields(ServerArgs))
FLOATS = [field.name for field in ARGUMENTS if str(field.type).startswith("float")]


@dataclass(frozen=True)
class Knobs:
    """Arguments that exist nowhere else."""

    warp: int = argument(
        3,
        "Levels",
        "Ship",
        low=1,
        high=9,
        shorthands=(Shorthand(flag="--stop", value=1, text="1"),),
    )
    shields: bool = argument(True, "Fly without", "Ship")
    course: str | None = argument(None, "Where to", "Ship", aliases=("--to",), is_local=True)
    drift: float | None = argument(None, "Slip", "Ship", above=0, high=2)
    mode: str = argument("calm", "How", "Ship", choices=("calm", "odd"), translated={"c": "calm"})

    def __post_init__(self) -> None:
        check_arguments(self)


def flags() -> dict[str, Flag]:
    return {flag.name: flag for declared in fields(Knobs) for flag in flags_of(declared)}


def test_a_declaration_is_a_flag() -> None:
    found = flags()
    assert [*found] == ["--warp", "--stop", "--disable-shields", "--course", "--drift", "--mode"]
    assert all(flag.flag_class is FlagClass.IMPLEMENTED for flag in found.values())
    assert found["--warp"].text == "Levels (3)"
    assert found["--warp"].kind is FlagKind.INT
    assert (found["--stop"].argument, found["--stop"].const) == ("warp", 1)
    assert (found["--disable-shields"].argument, found["--disable-shields"].const) == (
        "shields",
        False,
    )
    assert found["--course"].names == ("--course", "--to")
    assert found["--drift"].kind is FlagKind.FLOAT
    assert found["--drift"].text == "Slip"
    assert found["--mode"].aliases == {"c": "calm"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"warp": 10}, "warp is 10; expected an integer from 1 to 9"),
        ({"warp": True}, "warp is True; expected an integer from 1 to 9"),
        ({"warp": 2.0}, "warp is 2.0; expected an integer"),
        ({"warp": None}, "warp is None; expected an integer"),
        ({"shields": 1}, "shields is 1; expected true or false"),
        ({"course": "gs://b"}, "course is 'gs://b'; expected a directory of this machine"),
        ({"drift": 0}, r"drift is 0; expected a number in \(0, 2\]"),
        ({"drift": float("nan")}, r"drift is nan; expected a number in \(0, 2\]"),
        ({"drift": float("inf")}, r"drift is inf; expected a number in \(0, 2\]"),
        ({"drift": "1"}, r"drift is '1'; expected a number in \(0, 2\]"),
        ({"mode": "wild"}, "mode is 'wild'; expected one of calm, odd"),
    ],
)
def test_a_declaration_is_a_check(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Knobs(**given)


def test_what_a_declaration_allows_passes() -> None:
    for given in ({}, {"warp": 9}, {"drift": 2}, {"drift": 1e-9, "course": "a/b"}, {"mode": "odd"}):
        assert Knobs(**given) == replace(Knobs(), **given)


def test_every_argument_is_declared_in_a_group_of_the_table() -> None:
    assert {argument_of(field).group for field in ARGUMENTS} == set(GROUPS)
    flagged = {flag.argument for flag in FLAGS if flag.argument}
    assert flagged == {field.name for field in ARGUMENTS}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_no_number_is_taken_that_is_not_finite(name: str, value: float) -> None:
    owner = EngineArgs if name in EngineArgs.names() else ServerArgs
    with pytest.raises(ConfigError, match=rf"^{name} is {value}; expected "):
        owner(**{name: value})  # type: ignore[arg-type]
