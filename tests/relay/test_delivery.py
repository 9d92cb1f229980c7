from __future__ import annotations

from datetime import timedelta

import pytest

from relay.delivery import Answer, Delivered, Refused, Retry, Verdict, judge, unsent


def verdict_on(status: int, *, attempt: int = 1, retry_after: timedelta | None = None) -> Verdict:
    answer = Answer(status=status, reached=True, retry_after=retry_after)
    return judge(answer, attempt=attempt, endpoint="payments")


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
def test_2xx_delivers(status: int) -> None:
    assert verdict_on(status) == Delivered()


@pytest.mark.parametrize(
    "status", [300, 301, 302, 304, 307, 308, 400, 401, 403, 405, 406, 411, 413, 415, 418, 422, 431, 451, 501]
)
def test_a_redirect_or_a_refusing_status_refuses_with_its_code(status: int) -> None:
    verdict = verdict_on(status)

    assert isinstance(verdict, Refused)
    assert not verdict.disable
    assert verdict.outcome.kind == "refused"
    assert verdict.outcome.code == f"http-{status}"
    assert "payments" in verdict.outcome.detail


def test_410_refuses_and_closes_the_endpoint() -> None:
    verdict = verdict_on(410)

    assert isinstance(verdict, Refused)
    assert verdict.disable


@pytest.mark.parametrize("status", [408, 409, 500, 502, 503, 504, 505, 511, 520, 599])
def test_an_answer_that_does_not_say_no_is_tried_again_and_may_have_acted(status: int) -> None:
    assert verdict_on(status) == Retry(timedelta(seconds=1), reached=True)


@pytest.mark.parametrize("status", [404, 425, 429])
def test_an_answer_before_the_command_was_looked_at_leaves_a_later_refusal_definite(status: int) -> None:
    verdict = verdict_on(status)

    assert isinstance(verdict, Retry)
    assert not verdict.reached


def test_404_is_tried_again_for_a_short_while_only() -> None:
    assert [type(verdict_on(404, attempt=attempt)) for attempt in range(1, 7)] == [
        Retry,
        Retry,
        Retry,
        Retry,
        Refused,
        Refused,
    ]


@pytest.mark.parametrize(
    ("asked", "paused"),
    [
        (None, timedelta(seconds=60)),
        (timedelta(seconds=7), timedelta(seconds=7)),
        (timedelta(0), timedelta(seconds=60)),
        (timedelta(days=30), timedelta(hours=24)),
    ],
)
def test_429_pauses_the_endpoint_as_long_as_it_asks(asked: timedelta | None, paused: timedelta) -> None:
    assert verdict_on(429, retry_after=asked) == Retry(paused, reached=False, pause=paused)


def test_retry_after_delays_the_message_but_never_hurries_it() -> None:
    later = verdict_on(503, retry_after=timedelta(seconds=90))
    sooner = verdict_on(503, attempt=5, retry_after=timedelta(seconds=3))

    assert later == Retry(timedelta(seconds=90), reached=True)
    assert sooner == Retry(timedelta(seconds=30), reached=True)


def test_a_command_is_tried_after_1_2_5_10_30_seconds_and_then_each_minute() -> None:
    delays = [verdict_on(500, attempt=attempt) for attempt in range(1, 9)]

    assert delays == [Retry(timedelta(seconds=s), reached=True) for s in (1, 2, 5, 10, 30, 60, 60, 60)]


@pytest.mark.parametrize("reached", [True, False])
def test_no_answer_is_tried_again_and_remembers_whether_it_was_reached(*, reached: bool) -> None:
    answer = Answer(error_code="timeout", reached=reached)

    assert judge(answer, attempt=2, endpoint="payments") == Retry(timedelta(seconds=2), reached=reached)


def test_a_try_that_ended_on_our_side_reached_nothing() -> None:
    assert judge(unsent("no-secret"), attempt=1, endpoint="payments") == Retry(
        timedelta(seconds=1), reached=False
    )
