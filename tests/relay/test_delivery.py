from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from contracts.backoff import EVENT_SCHEDULE, BadSchedule, Schedule
from relay.delivery import (
    OURS,
    REMOVED,
    Answer,
    Dead,
    Delivered,
    Refused,
    Retry,
    Spared,
    Try,
    Verdict,
    judge,
    unsent,
)

MESSAGE = UUID("0199a3c4-0000-7000-8000-000000000001")


def this(attempt: int = 1, **more: Any) -> Try:
    return Try(message_id=MESSAGE, attempt=attempt, endpoint="payments", **more)


def verdict_on(
    status: int, *, attempt: int = 1, retry_after: timedelta | None = None, **more: Any
) -> Verdict:
    answer = Answer(status=status, reached=True, retry_after=retry_after)
    return judge(answer, this(attempt, **more))


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
def test_2xx_delivers(status: int) -> None:
    assert verdict_on(status) == Delivered()


@pytest.mark.parametrize(
    "status",
    [300, 301, 302, 304, 307, 308, 400, 401, 403, 405, 406, 411, 413, 415, 418, 422, 431, 451, 501, 505, 511],
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


@pytest.mark.parametrize("status", [408, 409, 500, 502, 503, 504, 520, 599])
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
    ],
)
@pytest.mark.parametrize("command", [True, False])
def test_429_pauses_the_endpoint_as_long_as_it_asks(
    asked: timedelta | None, paused: timedelta, *, command: bool
) -> None:
    verdict = verdict_on(429, retry_after=asked, command=command)

    assert isinstance(verdict, Retry)
    assert (verdict.after, verdict.pause, verdict.reached) == (max(paused, verdict.after), paused, False)


@pytest.mark.parametrize("status", [429, 503, 404])
def test_an_endpoint_that_asks_for_too_much_patience_gets_a_day_and_that_is_said(status: int) -> None:
    verdict = verdict_on(status, retry_after=timedelta(days=30))

    assert isinstance(verdict, Retry)
    assert (verdict.after, verdict.clamped) == (timedelta(days=1), True)


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

    assert judge(answer, this(2)) == Retry(timedelta(seconds=2), reached=reached)


def test_an_event_whose_endpoint_is_gone_is_a_dead_letter_and_a_command_waits_for_one() -> None:
    assert judge(unsent(REMOVED), this(command=False)) == Dead(REMOVED, reached=False)
    assert judge(unsent(REMOVED), this()) == Spared(timedelta(seconds=1))


@pytest.mark.parametrize("command", [True, False])
@pytest.mark.parametrize("code", sorted(OURS - {REMOVED}))
def test_a_try_that_ended_on_our_side_reached_nothing_and_does_not_count(code: str, *, command: bool) -> None:
    assert judge(unsent(code), this(command=command)) == Spared(timedelta(seconds=1))
    assert judge(unsent(code), this(500, command=command)) == Spared(timedelta(minutes=1))


@pytest.mark.parametrize(
    "code", ["connection-refused", "dns-failed", "tls-failed", "address-blocked", "timeout"]
)
def test_what_the_endpoint_is_to_blame_for_counts(code: str) -> None:
    assert isinstance(judge(unsent(code), this()), Retry)


def test_what_was_sent_counts_whoever_is_to_blame() -> None:
    assert isinstance(judge(Answer(error_code="out-of-files", reached=True), this()), Retry)


# Events


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
def test_2xx_delivers_an_event_whatever_its_body_does(status: int) -> None:
    assert verdict_on(status, command=False) == Delivered()


@pytest.mark.parametrize(
    "status",
    [
        300,
        301,
        302,
        304,
        307,
        308,
        400,
        401,
        403,
        404,
        405,
        408,
        409,
        413,
        415,
        421,
        422,
        425,
        451,
        500,
        501,
        503,
    ],
)
def test_any_other_answer_to_an_event_is_tried_again_on_the_schedule_of_events(status: int) -> None:
    verdict = verdict_on(status, command=False)

    assert isinstance(verdict, Retry)
    assert verdict.pause is None
    assert not verdict.disable
    assert timedelta(seconds=4) <= verdict.after <= timedelta(seconds=6)


FEW = [400, 401, 402, 403, 405, 406, 411, 413, 414, 415, 418, 421, 422, 431, 451, 501, 505, 511]


@pytest.mark.parametrize("status", FEW)
def test_an_answer_that_time_will_not_change_ends_an_event_after_three_tries(status: int) -> None:
    verdicts = [verdict_on(status, command=False, attempt=attempt) for attempt in (1, 2, 3)]

    assert [type(verdict) for verdict in verdicts] == [Retry, Retry, Dead]
    assert verdicts[2] == Dead(f"http-{status}", reached=True)


@pytest.mark.parametrize("status", FEW)
def test_an_endpoint_s_own_schedule_says_how_often_that_is_tried(status: int) -> None:
    own = Schedule((1.0,), attempts=5)

    verdicts = [verdict_on(status, command=False, attempt=attempt, schedule=own) for attempt in (3, 4, 5)]

    assert [type(verdict) for verdict in verdicts] == [Retry, Retry, Dead]


@pytest.mark.parametrize("status", [300, 301, 308, 404, 408, 409, 425, 500, 502, 503, 504, 507, 520])
def test_an_answer_that_time_may_change_is_tried_to_the_end_of_the_schedule(status: int) -> None:
    assert isinstance(verdict_on(status, command=False, attempt=9), Retry)
    assert isinstance(verdict_on(status, command=False, attempt=10), Dead)


def test_410_to_an_event_disables_its_endpoint_and_keeps_the_event() -> None:
    verdict = verdict_on(410, command=False, attempt=10)

    assert isinstance(verdict, Retry)
    assert verdict.disable


def test_an_event_is_tried_ten_times_over_three_days_and_is_dead_then() -> None:
    verdicts = [verdict_on(503, attempt=attempt, command=False) for attempt in range(1, 11)]
    waits = [verdict.after for verdict in verdicts if isinstance(verdict, Retry)]

    assert verdicts[-1] == Dead("http-503", reached=True)
    assert len(waits) == 9
    for found, wanted in zip(waits, EVENT_SCHEDULE.delays, strict=True):
        assert 0.8 * wanted <= found.total_seconds() <= 1.2 * wanted
    assert judge(Answer(error_code="timeout", reached=True), this(10, command=False)) == Dead(
        "timeout", reached=True
    )


def test_events_of_one_moment_do_not_come_back_at_one_moment() -> None:
    waits = {
        judge(
            Answer(status=500, reached=True), Try(message_id=uuid4(), attempt=1, endpoint="e", command=False)
        )
        for _ in range(20)
    }

    assert len(waits) == 20  # by chance alone two would be equal once in a hundred million runs


# Schedules of endpoints


@pytest.mark.parametrize("command", [True, False])
def test_an_endpoint_s_own_schedule_is_used_for_commands_and_events(*, command: bool) -> None:
    own = Schedule(delays=(7, 9), attempts=4)

    waits = [verdict_on(500, attempt=n, command=command, schedule=own) for n in range(1, 5)]

    assert waits == [
        *(Retry(timedelta(seconds=s), reached=True) for s in (7, 9, 9)),
        Dead("http-500", reached=True),
    ]


def test_delays_grow_by_a_factor_up_to_a_cap() -> None:
    own = Schedule(delays=(1,), factor=3, cap=20)

    assert [own.after(n) for n in (1, 2, 3, 4, 5, 10_000)] == [
        timedelta(seconds=s) for s in (1, 3, 9, 20, 20, 20)
    ]


def test_no_try_is_made_of_what_would_be_too_old_by_then() -> None:
    own = Schedule(delays=(60,), age=3600)

    assert verdict_on(500, schedule=own, age=timedelta(seconds=3540)) == Retry(
        timedelta(seconds=60), reached=True
    )
    assert verdict_on(500, schedule=own, age=timedelta(seconds=3541)) == Dead("http-500", reached=True)


def test_a_pause_that_comes_with_the_last_answer_is_kept() -> None:
    own = Schedule(delays=(1,), attempts=1)

    assert verdict_on(429, schedule=own) == Dead("http-429", reached=False, pause=timedelta(seconds=60))


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(delays=(1, 2)),
        Schedule(delays=(0.5,), factor=2, cap=60, attempts=7, age=3600, jitter=0.1),
        EVENT_SCHEDULE,
    ],
)
def test_a_schedule_is_read_as_it_was_written(schedule: Schedule) -> None:
    assert Schedule.of(schedule.as_json()) == schedule


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"delays": []},
        {"delays": "1"},
        {"delays": [True]},
        {"delays": ["1"]},
        {"delays": [-1]},
        {"delays": [1e9]},
        {"delays": [1] * 51},
        {"delays": [1], "factor": 0},
        {"delays": [1], "attempts": 0},
        {"delays": [1], "attempts": 1001},
        {"delays": [1], "jitter": 2},
        {"delays": [1], "age": 0},
        {"delays": [1], "else": 1},
    ],
)
def test_what_is_no_schedule_is_refused(value: object) -> None:
    with pytest.raises(BadSchedule):
        Schedule.of(value)


def test_a_refusal_is_not_definite_when_the_same_try_may_have_arrived_before_it() -> None:
    """It is asked again, and then counts as what follows a try that may have arrived."""
    answer = Answer(status=422, reached=True, cut_before=True)

    assert judge(answer, this()) == Retry(timedelta(seconds=1), reached=True)
