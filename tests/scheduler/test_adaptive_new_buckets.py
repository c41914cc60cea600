"""The chooser where the number of rows changes, and a bucket is new while others are known."""

from __future__ import annotations

from collections import Counter

from tests.scheduler.test_adaptive_shapes import AT_64_ROWS, EMITTED, FEW_ACCEPTED, chosen

PASSING = 6  # steps of half as many rows in each wave of 200, while the others' prompts run
TREES = {name for name in AT_64_ROWS if name.startswith("3/4/16")}


def rows(step: int) -> int:
    return 32 if step % 200 < PASSING else 64


def of_rows(step: int, name: str, before: str) -> float:
    """Half as many rows are half as slow by what exceeds a plain step."""
    del before
    plain = AT_64_ROWS["0/1/1"]
    return plain + (AT_64_ROWS[name] - plain) * rows(step) / 64


def test_what_is_known_not_to_pay_is_not_tried_where_rows_pass_through() -> None:
    """Six tries of a tree at 32 rows would cost as much as forty plain steps, and nothing says
    that it pays there."""
    names = chosen(rows, FEW_ACCEPTED, of_rows, num_steps=3000)
    passing = [name for step, name in enumerate(names) if rows(step) == 32]
    # The first wave begins with the largest shape, whatever it costs; later a look is due.
    assert sum(name in TREES for name in passing[PASSING:]) <= 8, Counter(passing)


def test_what_may_pay_is_tried_wherever_rows_are() -> None:
    names = chosen(rows, EMITTED, lambda _, name, __: 5.0 + 0.1 * len(name), num_steps=3000)
    passing = [name for step, name in enumerate(names) if rows(step) == 32]
    assert sum(name in TREES for name in passing) > 12, Counter(passing)


def test_where_rows_stay_all_is_tried_at_last() -> None:
    """What is known of 64 rows may not hold at 32."""

    def later(step: int) -> int:
        return 64 if step < 400 else 32

    def cheap(step: int, name: str, before: str) -> float:
        return of_rows(step, name, before) if step < 400 else 5.0

    names = chosen(later, FEW_ACCEPTED, cheap, num_steps=6000)
    assert names[-1000:].count("3/4/16") > 800, Counter(names[-1000:])


NONE_ACCEPTED = dict.fromkeys(AT_64_ROWS, 1.0)
RUN = 288  # steps of a batch: its rows come and go eight a step


def of_batches(step: int) -> int:
    at = step % RUN
    return 8 * min(at + 1, 8, RUN - at)


def of_batches_ms(step: int, name: str, before: str) -> float:
    del before
    plain = AT_64_ROWS["0/1/1"]
    return plain + (AT_64_ROWS[name] - plain) * (32 if of_batches(step) <= 32 else 64) / 64


def test_what_nothing_could_make_pay_is_hardly_looked_at() -> None:
    """Where no draft is right a tree is worth less than plain steps even if it took no longer, so
    neither measuring it again nor trying it at few rows can show anything."""
    names = chosen(of_batches, NONE_ACCEPTED, of_batches_ms, num_steps=6 * RUN)
    later = range(2 * RUN, 6 * RUN)  # all has been tried by then
    plain = sum(of_batches_ms(step, "0/1/1", "") for step in later)
    lost = sum(of_batches_ms(step, names[step], "") for step in later) / plain - 1
    assert lost < 0.006, (lost, Counter(names[2 * RUN :]))
    assert sum(name in TREES for name in names[2 * RUN :]) <= 2, Counter(names[2 * RUN :])


def test_what_was_run_twice_is_not_measured_again_but_tried() -> None:
    """So few steps are no cost; the first try waits until the loss allows."""
    names = chosen(of_batches, FEW_ACCEPTED, of_batches_ms, num_steps=4 * RUN)
    passing = [name for step, name in enumerate(names) if step >= RUN and of_batches(step) <= 32]
    assert sum(name in TREES for name in passing) <= 2, Counter(passing)
