"""Where an ask stands: names, ordinals and limits of paths."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import Context, FlowError, hours, workflow
from orchestrator.core.errors import LimitExceeded
from orchestrator.core.path import Frame, segment, undo_path
from orchestrator.testing import FlowTester


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("reserve", "reserve"),
        ("By_air-2", "By_air-2"),
        ("a/b", "a%2Fb"),
        ("a#2", "a%232"),
        ("a.b", "a%2Eb"),
        ("100%", "100%25"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("😀", "%F0%9F%98%80"),
        (" ", "%20"),
        ("", "%"),
    ],
)
def test_a_segment_is_the_name_with_all_that_could_mean_structure_encoded(name: str, path: str) -> None:
    assert segment(name) == path


@settings(derandomize=True, database=None)
@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_two_names_never_share_a_segment(one: str, two: str) -> None:
    assert (segment(one) == segment(two)) == (one == two)
    assert re.fullmatch(r"%|([A-Za-z0-9_-]|%[0-9A-F]{2})+", segment(one))


def test_a_name_is_numbered_from_its_second_use_in_a_frame() -> None:
    frame = Frame()

    paths = [frame.next(name) for name in ("a", "a", "b", "a", "a#2", "b")]

    assert paths == ["a", "a#2", "b", "a#3", "a%232", "b#2"]


def test_frames_count_apart_under_their_prefix() -> None:
    one, two = Frame("all.0/"), Frame("all.1/")

    assert [one.next("x"), two.next("x"), one.next("x")] == ["all.0/x", "all.1/x", "all.0/x#2"]


def test_a_path_has_at_most_512_bytes() -> None:
    assert len(Frame().next("x" * 512)) == 512
    with pytest.raises(LimitExceeded, match="a path of 513 bytes, at most 512"):
        Frame().next("x" * 513)
    with pytest.raises(LimitExceeded, match="a path of 600 bytes"):
        Frame().next("/" * 200)


def test_tries_of_an_undo_are_numbered_from_the_second() -> None:
    assert [undo_path("charge#2", n) for n in (1, 2, 3)] == [
        "charge#2/undo",
        "charge#2/undo#2",
        "charge#2/undo#3",
    ]


def test_calls_steps_sleeps_and_draws_count_in_one_frame() -> None:
    @workflow(name="counts", version="1")
    async def counts(ctx: Context, n: int) -> list[str]:
        await ctx.sleep(hours(1), name="uuid")
        drawn = [str(ctx.uuid())]
        await ctx.call("s", "uuid")
        return [*drawn, str(ctx.uuid())]

    flow = FlowTester(counts, 1)
    flow.passes(hours(1))
    flow.tell("ended", "uuid#3", {"outcome": "done", "value": None})

    assert flow.told == ["uuid", "uuid#3"]
    assert len(set(flow.returned)) == 2


@pytest.mark.parametrize("name", ["x" * 129, "é" * 65, "a\x00b", "a\nb", "\ud800", "\x1b[31m"])
def test_a_name_that_nobody_could_store_or_read_is_refused_before_anything_is_written(name: str) -> None:
    @workflow(name="names", version="1")
    async def names(ctx: Context, n: int) -> str:
        try:
            await ctx.call("s", "a", name=name)
        except FlowError as error:
            return str(error)
        return "sent"

    flow = FlowTester(names, 1)

    assert "128 bytes of printable text" in flow.returned
    assert flow.returned.isprintable()
    assert flow.told == []
