"""The orders that are run: each once, all of them, and the cut-ins first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb

import pytest

from tests.explorer import orders
from tests.explorer.orders import Choice, Chooser, name_of


@dataclass
class Ran:
    choices: list[Choice] = field(default_factory=list[Choice])

    @property
    def name(self) -> str:
        return name_of(self.choices)


class Programs:
    """Programs of so many steps. From its step `locks[p]` on (counted from 0), p holds the one lock there is."""

    def __init__(self, *sizes: int, locks: Sequence[int | None] | None = None) -> None:
        self.sizes = sizes
        self.locks = locks or [None] * len(sizes)
        self.runs = 0

    async def run(self, choose: Chooser) -> Ran:
        self.runs += 1
        ran, at, waits = Ran(), [0] * len(self.sizes), set[int]()
        while True:
            can = tuple(n for n in range(len(at)) if at[n] < self.sizes[n] and n not in waits)
            if not can:
                return ran
            taken = choose(can)
            ran.choices.append(Choice(can, taken))
            if at[taken] == self.locks[taken] and self.is_held(at):
                waits.add(taken)
                continue
            at[taken] += 1
            if at[taken] == self.sizes[taken]:
                for one in waits:
                    at[one] += 1
                waits.clear()

    def is_held(self, at: Sequence[int]) -> bool:
        return any(
            lock is not None and lock < done < size
            for lock, done, size in zip(self.locks, at, self.sizes, strict=True)
        )


@pytest.mark.parametrize("sizes", [(1, 1), (3, 4), (0, 2), (2, 2, 2), (5,)])
async def test_where_nobody_waits_every_order_is_run_once(sizes: tuple[int, ...]) -> None:
    steps = "".join(str(program) * size for program, size in enumerate(sizes))
    expected = sorted({"".join(order) for order in itertools.permutations(steps)})

    assert [ran.name async for ran in orders.every(Programs(*sizes).run)] == expected


async def test_where_one_waits_no_order_is_run_twice_and_those_that_are_the_same_are_one() -> None:
    """Both lock with their first step: whoever is second asks once, at any place before the end of the first."""
    found = [ran.name async for ran in orders.every(Programs(3, 2, locks=[0, 0]).run)]

    assert found == ["00011", "00101", "01001", "10100", "11000"]
    assert len(found) < comb(5, 2)


async def test_cut_ins_interrupt_each_program_at_each_place() -> None:
    found = [ran.name async for ran in orders.some(Programs(2, 3).run, programs=2, at_most=0)]

    assert sorted(found) == ["00111", "01110", "10011", "11001", "11100"]


async def test_a_sample_begins_with_the_cut_ins_is_bounded_and_the_same_each_time() -> None:
    cut_ins = [ran.name async for ran in orders.some(Programs(6, 6).run, programs=2, at_most=0)]

    first = [ran.name async for ran in orders.some(Programs(6, 6).run, programs=2, at_most=40)]
    again = [ran.name async for ran in orders.some(Programs(6, 6).run, programs=2, at_most=40)]

    assert first == again
    assert len(set(first)) == len(first) == 40
    assert first[: len(cut_ins)] == cut_ins


async def test_no_order_is_run_twice() -> None:
    programs = Programs(4, 5, locks=[0, 1])

    found = [ran.name async for ran in orders.some(programs.run, programs=2, at_most=1000)]

    assert programs.runs == len(found) == len(set(found))
    assert sorted(found) == [ran.name async for ran in orders.every(Programs(4, 5, locks=[0, 1]).run)]


async def test_a_sample_of_few_orders_is_all_of_them() -> None:
    found = [ran.name async for ran in orders.some(Programs(1, 1).run, programs=2, at_most=40)]

    assert sorted(found) == ["01", "10"]


@pytest.mark.parametrize(
    ("order", "found"),
    [("0101", "0101"), ("11", "1100"), ("", "0011"), ("1110", "1100"), ("00001", "0011")],
)
async def test_an_order_is_followed_and_steps_that_cannot_be_taken_are_passed_over(
    order: str, found: str
) -> None:
    assert (await Programs(2, 2).run(orders.follow(order))).name == found
