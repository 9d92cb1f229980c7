"""Providers as data: what each sends beside its signature, how long it waits, and when it comes again.

Bodies and headers are texts with `${id}`, `${number}`, `${type}`, `${time}` (ISO 8601) and `${timestamp}` (seconds).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from contracts.backoff import EVENT_SCHEDULE, Schedule
from contracts.envelope import STRUCTURED

MINUTE: Final = 60
HOUR: Final = 3_600
DAY: Final = 86_400
UUID: Final = "uuid"
"""Instead of a prefix: ids are UUIDs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What is particular to a provider. `type` is that of its events where nothing else is said; `prefix` begins its
    ids.

    `waits` is how many seconds it waits for an answer; `schedule` when it comes again, None: never. `again` are headers
    of all tries but the first, where `${tries}` is how many there were. `stops` are the header and its value with which
    an answer ends it, `gone` whether 410 does. `spelling` is which name of several its headers have.
    """

    type: str
    prefix: str
    body: str
    waits: float
    schedule: Schedule | None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    again: Mapping[str, str] = field(default_factory=dict[str, str])
    stops: tuple[str, str] | None = None
    gone: bool = False
    content_type: str = "application/json"
    spelling: int = 0


PLAIN: Final = '{"id": "${id}", "type": "${type}", "number": ${number}, "time": "${time}"}'

PROVIDERS: Final[Mapping[str, Habits]] = {
    "standard-webhooks": Habits(
        type="simulated.happened",
        prefix="msg_",
        body='{"specversion": "1.0", "id": "${id}", "source": "/simulator", "type": "${type}",'
        ' "subject": "${number}", "time": "${time}", "datacontenttype": "application/json",'
        ' "data": {"number": ${number}}}',
        waits=20.0,
        schedule=EVENT_SCHEDULE,
        content_type=STRUCTURED,
        gone=True,
    ),
    "svix": Habits(
        type="invoice.paid",
        prefix="msg_",
        body='{"type": "${type}", "timestamp": "${time}", "data": {"id": "in_${number}"}}',
        waits=15.0,
        schedule=Schedule(
            (5, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 10 * HOUR), attempts=8, jitter=0.2
        ),
        stops=("webhook-delivery", "abort-message"),
        gone=True,
        spelling=1,
    ),
    "stripe": Habits(
        type="charge.succeeded",
        prefix="evt_",
        body='{"id": "${id}", "object": "event", "type": "${type}", "created": ${timestamp},'
        ' "data": {"object": {"id": "ch_${number}", "object": "charge", "amount": 4200}}}',
        waits=20.0,
        schedule=Schedule((5 * MINUTE,), factor=2, cap=12 * HOUR, age=3 * DAY),
    ),
    "github": Habits(
        type="issues",
        prefix=UUID,
        body='{"action": "opened", "issue": {"number": ${number}, "node_id": "${id}"},'
        ' "repository": {"url": "https://api.github.com/repos/simulated/shop"}}',
        waits=10.0,
        schedule=None,
        headers={"x-github-event": "${type}", "x-github-delivery": "${id}"},
    ),
    "slack": Habits(
        type="message",
        prefix="Ev",
        body='{"type": "event_callback", "event_id": "${id}", "event_time": ${timestamp},'
        ' "event": {"type": "${type}", "channel": "C${number}", "text": "simulated"}}',
        waits=3.0,
        schedule=Schedule((1, MINUTE, 5 * MINUTE), attempts=4),
        again={"x-slack-retry-num": "${tries}", "x-slack-retry-reason": "http_error"},
        stops=("x-slack-no-retry", "1"),
    ),
    "shopify": Habits(
        type="orders/create",
        prefix=UUID,
        body='{"id": ${number}, "total_price": "199.00", "created_at": "${time}"}',
        waits=5.0,
        schedule=Schedule(
            (*(minutes * MINUTE for minutes in (1, 2, 4, 8, 15, 30, 60, 120)),), attempts=9
        ),  # four hours
        headers={
            "x-shopify-topic": "${type}",
            "x-shopify-shop-domain": "simulated.myshopify.com",
            "x-shopify-webhook-id": "${id}",
            "x-shopify-event-id": "${id}",
            "x-shopify-triggered-at": "${time}",
        },
    ),
    "hmac": Habits(type="order.paid", prefix="evt_", body=PLAIN, waits=15.0, schedule=EVENT_SCHEDULE),
    "bearer": Habits(type="order.paid", prefix="evt_", body=PLAIN, waits=15.0, schedule=EVENT_SCHEDULE),
}
"""By the name of their scheme. Sources: Standard Webhooks 1.0.0; the documentation of each. Stripe says three days and
Shopify eight times in four hours; how long the waits are is our guess. GitHub does not come again by itself.
"""
