"""A provider of webhooks, simulated: it posts as the real one does, and comes again when the real one would."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import secrets as entropy
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count as counting
from random import Random
from typing import Any, Final

import aiohttp

from contracts.signature import Signer
from orchestrator.simulators import targets
from orchestrator.simulators.plan import Delivery, Plan, PlanInvalid, deliveries, filled
from orchestrator.simulators.providers import PROVIDERS
from orchestrator.simulators.signing import parse_signer, proof, signs_with_many
from receiver.schemes import Proving, policy_of
from relay.wire import Progress, code_of, progress_trace, read_up_to

ANSWER_BYTES_MAX: Final = 16 * 1024
"""Of an answer's body; what comes after them is not read."""
SEED_MAX: Final = 2**32 - 1
GONE: Final = 410


@dataclass(slots=True)
class Report:
    """What became of a run. `answers` counts all tries by their answer: a status, or what happened instead."""

    provider: str
    to: str
    seed: int
    deliveries: list[Delivery]
    answers: Counter[str] = field(default_factory=Counter[str])
    stopped: bool = False

    @property
    def events(self) -> int:
        return len(self.deliveries) - self.copies

    @property
    def copies(self) -> int:
        return sum(it.is_copy for it in self.deliveries)

    @property
    def requests(self) -> int:
        return self.answers.total()

    @property
    def retried(self) -> int:
        """Tries after the first of each."""
        return sum(max(it.tries - 1, 0) for it in self.deliveries)

    @property
    def accepted(self) -> int:
        """Events and copies that were answered 2xx in the end."""
        return sum(it.accepted for it in self.deliveries)

    @property
    def all_accepted(self) -> bool:
        return self.accepted == len(self.deliveries)

    @property
    def ids(self) -> list[str]:
        """Of the events, in the order in which they were first sent."""
        return list(dict.fromkeys(it.id for it in self.deliveries if it.tries))

    def as_json(self) -> dict[str, Any]:
        counts = ("events", "copies", "requests", "retried", "accepted", "stopped")
        failed = [it for it in self.deliveries if not it.accepted]
        return {
            **{name: getattr(self, name) for name in ("provider", "to", "seed", *counts)},
            "answers": dict(sorted(self.answers.items())),
            "not_accepted": [{"id": it.id, "tries": it.tries, "last": it.last} for it in failed],
            "ids": self.ids,
        }


Told = Callable[[Delivery, float], None]


class Provider:
    """One that posts to one URL; see `provider`."""

    def __init__(
        self, name: str, *, to: str, secret: str, form: Proving, seed: int, session: aiohttp.ClientSession
    ) -> None:
        self.name = name
        self.seed = seed
        self._to = to
        self._form = form
        self._habits = PROVIDERS[name]
        self._keys: list[Signer] = [parse_signer(form, secret)]
        self._session = session
        self._chance = Random(seed)  # noqa: S311  # one seed, one run: that is what it is for
        self._jitter = Random(seed)  # noqa: S311  # another one, since tries come as answers do
        self._number = 1

    async def sends(
        self,
        count: int = 1,
        *,
        rotate_to: str = "",
        stop: asyncio.Event | None = None,
        told: Told | None = None,
        **how: Any,
    ) -> Report:
        """Send `count` events, and come again for each that is not accepted until the provider would give up. `how` is
        what a Plan has. With `rotate_to`, another secret, it changes to that in the middle.

        Ends earlier when `stop` is set; `told` hears of what comes again, and in how many seconds. Raises PlanInvalid,
        BadSecret.
        """
        plan = Plan(count=count, **how)
        if plan.skew and not self._form.signs_time:
            raise PlanInvalid(f"skew: expected none, as {self.name} signs no time, found {plan.skew}")
        next_key = parse_signer(self._form, rotate_to) if rotate_to else None
        made = deliveries(self._habits, plan, self._chance, first=self._number)
        self._number += plan.count
        report = Report(self.name, self._to.partition("?")[0], self.seed, made)
        await self._send_all(report, plan, next_key, stop or asyncio.Event(), told or (lambda _, __: None))
        if next_key is not None:
            self._keys = [next_key]
        return report

    async def _send_all(
        self, report: Report, plan: Plan, next_key: Signer | None, stop: asyncio.Event, told: Told
    ) -> None:
        """One after the other, each when it is due."""
        order, began, first = counting(), time.monotonic(), 0
        queue = [(place / plan.rate, next(order), it) for place, it in enumerate(report.deliveries)]
        while queue:
            due, _, delivery = heapq.heappop(queue)
            if await is_set_within(stop, began + due - time.monotonic()):
                report.stopped = True
                return
            first += not delivery.tries
            keys = self._keys_at(first / len(report.deliveries), next_key)
            wait = await self._try(delivery, keys, plan)
            report.answers[delivery.last] += 1
            if wait is not None:
                wait /= plan.speed
                told(delivery, wait)
                heapq.heappush(queue, (time.monotonic() - began + wait, next(order), delivery))

    def _keys_at(self, part: float, next_key: Signer | None) -> Sequence[Signer]:
        """The secrets that sign when `part` of all has been sent: at first the old one, from the middle on both, where
        a header has room for both, and in the last quarter the new one alone.
        """
        if next_key is None or part <= 0.5:
            return self._keys
        return [next_key, *self._keys] if part <= 0.75 and signs_with_many(self._form) else [next_key]

    async def _try(self, delivery: Delivery, keys: Sequence[Signer], plan: Plan) -> float | None:
        """Post it once. How many seconds of the provider's clock until it comes again; None when it does not."""
        habits, form, body = self._habits, self._form, delivery.body
        again: Mapping[str, str] = habits.again if delivery.tries else {}
        proved = proof(
            form,
            keys,
            message_id=delivery.id,
            timestamp=int(time.time()) + plan.skew,
            body=body,
            spelling=min(habits.spelling, len(form.header) - 1),
        )
        headers = {
            **delivery.headers,
            **{name: filled(text, {"tries": str(delivery.tries)}) for name, text in again.items()},
            **proved,
        }
        delivery.tries += 1
        delivery.last, ends = await self._post(body, headers)
        delivery.accepted = delivery.last.startswith("2") and delivery.last.isdigit()
        return None if delivery.accepted or ends else self._wait_of(delivery)

    def _wait_of(self, delivery: Delivery) -> float | None:
        if (schedule := self._habits.schedule) is None:
            return None
        wait = schedule.after(
            delivery.tries, age=timedelta(seconds=delivery.age), chance=self._jitter.random()
        )
        if wait is None:
            return None
        delivery.age += wait.total_seconds()
        return wait.total_seconds()

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> tuple[str, bool]:
        """What was answered, or happened instead, and whether that ends it."""
        progress, stops = Progress(), self._habits.stops
        try:
            async with self._session.post(
                self._to,
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._habits.waits),
                allow_redirects=False,
                trace_request_ctx=progress,
            ) as answer:
                await read_up_to(answer, ANSWER_BYTES_MAX)
                told = stops is not None and answer.headers.get(stops[0], "") == stops[1]
                return str(answer.status), told or (self._habits.gone and answer.status == GONE)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            return code_of(error, progress), False


async def is_set_within(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for so long, or until `stop` is set; whether it is."""
    if seconds > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await stop.wait()
    return stop.is_set()


@asynccontextmanager
async def provider(
    name: str,
    *,
    to: str,
    secret: str,
    settings: Mapping[str, Any] | None = None,
    allow_hosts: Sequence[str] = (),
    seed: int | None = None,
) -> AsyncGenerator[Provider]:
    """The provider of that scheme (`stripe`, `github`, …), which posts to the URL `to` and proves itself with `secret`.

    `settings` are those of a sender, for a scheme that has some of its own. It posts to this machine and to private
    networks, and elsewhere only to `allow_hosts`. One `seed` makes the same events, byte for byte. Raises
    SettingsInvalid, BadSecret, TargetRefused.
    """
    form = policy_of(name, settings or {}).signature
    await targets.check(to, allow_hosts)
    connector = aiohttp.TCPConnector(socket_factory=targets.sockets(targets.host_of(to), allow_hosts))
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        headers={"User-Agent": "Waypost-simulator"},
        trace_configs=[progress_trace()],
    ) as session:
        drawn = entropy.randbelow(SEED_MAX) if seed is None else seed
        yield Provider(name, to=to, secret=secret, form=form, seed=drawn, session=session)
