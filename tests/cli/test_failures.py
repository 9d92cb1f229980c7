"""`waypost dev` tells of each endpoint the first try that fails, and not the hundred that follow."""

from __future__ import annotations

import json

import pytest

from orchestrator.cli.failures import Failures


def tried(
    endpoint: str = "bank", *, outcome: str, status: int | None = None, error: str | None = None
) -> str:
    """A line of a relay's log."""
    said = {"part": "relay", "event": "message.tried", "endpoint": endpoint, "attempt": 1}
    return json.dumps(said | {"outcome": outcome, "status": status, "error": error})


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def hear(told: list[str]) -> Failures:
    return Failures(told.append)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (tried(outcome="retry", error="connection-refused"), "try 1: connection-refused; it is tried again"),
        (tried(outcome="retry", status=503), "try 1: 503; it is tried again"),
        (tried(outcome="refused", status=401), "try 1: 401; it counts as refused"),
        (
            tried(outcome="delivered", status=200, error="reply-malformed-event"),
            "200 reply-malformed-event; it was taken",
        ),
    ],
)
def test_a_try_that_fails_is_told(hear: Failures, told: list[str], line: str, said: str) -> None:
    hear(line)

    assert len(told) == 1
    assert told[0].startswith("endpoint bank, ")
    assert said in told[0]


def test_those_that_follow_are_not_told_until_one_went_well(hear: Failures, told: list[str]) -> None:
    bad, good = tried(outcome="retry", status=503), tried(outcome="delivered", status=202)

    for line in (good, bad, bad, bad, good, good, bad):
        hear(line)

    assert len(told) == 2


def test_each_endpoint_is_told_by_itself(hear: Failures, told: list[str]) -> None:
    for endpoint in ("bank", "shop", "bank", "shop"):
        hear(tried(endpoint, outcome="retry", status=503))

    assert [line.split(",")[0] for line in told] == ["endpoint bank", "endpoint shop"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Traceback (most recent call last):",
        '{"event": "relay.started"}',
        '{"event": "message.tried"',
        '{"event": "message.tried"}',
        '["event": "message.tried"]',
        '[{"event": "message.tried"}]',
    ],
)
def test_other_lines_say_nothing(hear: Failures, told: list[str], line: str) -> None:
    hear(line)

    assert told == []
