"""The tasks of a program of the packed Hopper kernel, and a task's walk over the keys of its rows.
Every warp group of a program iterates over them alike. shape and refs are gpu.py's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jspec.pallas_kernels.prefill.gpu_plan import NUM_COLUMNS, OFFSET


@dataclass(frozen=True)
class Task:
    """A block of queries and a tile of heads: scalars that a program's warp groups share."""

    line: Any  # line of the plan
    head: Any  # its query heads start at head * heads
    done: Any  # steps of the program before this task
    block: Any  # block of queries; this and the next three are the plan's bounds
    first_row: Any
    last_row: Any
    steps: Any  # blocks of keys over all rows


@dataclass(frozen=True)
class Walk:
    """A row's blocks of keys in one program: a row number, then the plan's columns."""

    row: Any
    begin: Any
    whole_begin: Any
    whole_end: Any
    end: Any
    offset: Any
    keys: Any


def for_each_task(shape: Any, refs: Any, serve: Callable[[Task], None]) -> Any:
    """Run `serve` for the program's tasks and return the number of steps.

    Tasks go from heavy to light, every other round in reverse, to balance the programs.

    In:  8 tasks, 3 programs    Out: tasks 0 5 6 | 1 4 7 | 2 3
    """
    program, programs = lax.axis_index("program"), shape.programs

    def place_in(turn: Any) -> Any:
        return jnp.where(lax.rem(turn, 2) == 0, program, programs - 1 - program)

    def run(turn: Any, done: Any) -> Any:
        number = turn * programs + place_in(turn)
        line = lax.div(number, shape.head_tiles)  # heads of a page are read close together
        bounds = [refs.bounds[line, i] for i in range(4)]
        task = Task(line, lax.rem(number, shape.head_tiles), done, *bounds)
        serve(task)
        return done + task.steps

    full, rest = divmod(shape.tasks, programs)
    turns = full + (place_in(jnp.int32(full)) < rest).astype(jnp.int32)
    return lax.fori_loop(0, turns, run, jnp.int32(0))


def walk_of(refs: Any, task: Task, row: Any) -> Walk:
    line = [refs.walks[task.line, row, i] for i in range(NUM_COLUMNS)]
    line[OFFSET] += task.done
    return Walk(row, *line)
