"""What the answers of an endpoint say about the endpoint: that it wants to be left alone, that it is gone, that it has
failed for days, or that nothing gets through just now.

It stands in the endpoint's row, for all relays. The row is written after a failure, and after a success while it still
tells of a failure: endpoints that work cost nothing.

    circuit closed ── of 10 tries or more in a minute 7 in 10 failed ──▶ open, for 1 s
      ▲                                                                   │ 1 s later: one try, of the longest due
      └── it went through ──────────────────── to see ◀───────────────────┘ it failed: open for 2, 4, … 30 s
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, LiteralString

from psycopg import AsyncConnection

from relay.delivery import Dead, Delivered, Refused, Retry, Spared
from relay.outbox import EndpointKey, Result

Connection = AsyncConnection[Any]

WINDOW: Final = timedelta(minutes=1)  # in which tries and failures are counted
WINDOW_TRIES_MIN: Final = 10  # tries of a window; of fewer nothing is concluded
FAILING_RATIO: Final = 0.7  # of the tries of a window that failed; then the circuit opens
OPEN_FIRST: Final = timedelta(seconds=1)  # before the first try to see; each time twice as long
OPEN_MAX: Final = timedelta(seconds=30)  # the longest time between two tries to see


@dataclass(slots=True)
class Note:
    """What one batch of results says about an endpoint.

    `tries` are those that reached the network, `failures` those of them that got no answer, or one of the 5xx.
    `succeeded`: some message was taken, or refused by a service that looked at it; `failed`: some was not.
    `probed`: a try that was to see has failed.
    """

    tries: int = 0
    failures: int = 0
    succeeded: bool = False
    failed: bool = False
    probed: bool = False
    watched: bool = False
    pause: timedelta | None = None
    gone: bool = False

    @property
    def is_news(self) -> bool:
        return self.failed or self.watched or self.gone or self.pause is not None

    def add(self, result: Result) -> None:
        match result.verdict:
            case Spared():
                return
            case Delivered():
                self.succeeded = True
            case Refused(disable=gone):
                self.succeeded = not gone or self.succeeded
                self.failed |= gone
                self.gone |= gone
            case Retry(pause=pause, disable=gone):
                self._fail(pause)
                self.gone |= gone
            case Dead(pause=pause):
                self._fail(pause)
        status = result.answer.status
        unwell = status is None or (status >= 500 and not isinstance(result.verdict, Refused))
        self.tries += 1
        self.failures += unwell
        self.probed |= unwell and result.message.probe
        self.watched |= result.message.watched

    def _fail(self, pause: timedelta | None) -> None:
        self.failed = True
        if pause is not None:
            self.pause = max(self.pause or pause, pause)


def notes_on(results: Iterable[Result]) -> dict[EndpointKey, Note]:
    """What there is to write, by endpoint; usually nothing."""
    notes: dict[EndpointKey, Note] = {}
    for result in results:
        notes.setdefault(result.message.endpoint_key, Note()).add(result)
    return {key: note for key, note in notes.items() if note.is_news}


@dataclass(frozen=True, slots=True)
class Change:
    """What a note changed: the endpoint was disabled, its circuit opened or closed."""

    tenant_id: int
    name: str
    disabled: str | None
    opened: bool
    closed: bool


# Sorted, so that two relays cannot lock each other out. All that is written is computed from rows that are locked. A
# pause only ever grows; one success makes the time of failures begin anew. Who subscribes to it is told with the same
# commit that an endpoint is disabled.
NOTE: Final[LiteralString] = """
    with old as materialized (
        select e.*, t.tries, t.failures, t.succeeded, t.failed, t.probed, t.pause, t.gone,
               coalesce(%(now)s::timestamptz, clock_timestamp()) as at
          from unnest(%(tenant)s::int[], %(name)s::text[], %(tries)s::int[], %(failures)s::int[],
                      %(succeeded)s::bool[], %(failed)s::bool[], %(probed)s::bool[], %(pause)s::interval[],
                      %(gone)s::bool[])
               as t(tenant_id, name, tries, failures, succeeded, failed, probed, pause, gone)
          join waypost.endpoint e
            on e.tenant_id = t.tenant_id
           and e.name = t.name
         order by e.tenant_id, e.name
           for no key update of e
    ),
    counted as materialized (
        select old.*,
               case when old.window_at > old.at - %(window)s::interval then old.window_at end as began,
               case when old.window_at > old.at - %(window)s::interval then old.window_tries else 0 end
               + old.tries as all_tries,
               case when old.window_at > old.at - %(window)s::interval then old.window_failures else 0 end
               + old.failures as all_failures,
               case when not old.succeeded and old.failed then coalesce(old.failing_since, old.at) end as failing
          from old
    ),
    new as materialized (
        select c.*,
               case when c.gone then 'gone'
                    when c.failing <= c.at - c.disable_after then 'failing' end as closes,
               case when c.open_until is null and c.all_tries >= %(tries_min)s::int
                         and c.all_failures >= %(ratio)s::float8 * c.all_tries then 1
                    when c.open_until is not null and c.failures < c.tries then 0
                    when c.open_until is not null and c.probed then least(c.opened + 1, 30)
                    else c.opened end as opens
          from counted c
    ),
    changed as (
        update waypost.endpoint e
           set paused_until    = greatest(e.paused_until, new.at + new.pause),
               state           = case when new.closes is not null then 'disabled' else e.state end,
               fault           = case when new.closes is not null and e.state = 'enabled' then new.closes
                                      else e.fault end,
               failing_since   = new.failing,
               opened          = new.opens,
               open_until      = case when new.opens = 0 then null
                                      when new.opens = new.opened then e.open_until
                                      else new.at + least(%(open_first)s::interval * 2 ^ (new.opens - 1),
                                                          %(open_max)s::interval) end,
               window_at       = case when new.opens <> new.opened then null else coalesce(new.began, new.at) end,
               window_tries    = case when new.opens <> new.opened then 0 else new.all_tries end,
               window_failures = case when new.opens <> new.opened then 0 else new.all_failures end
          from new
         where e.tenant_id = new.tenant_id
           and e.name = new.name
     returning e.tenant_id, e.name, case when new.state = 'enabled' then new.closes end as disabled,
               new.opens > 0 and new.opened = 0 as opened, new.opens = 0 and new.opened > 0 as closed
    )
    select c.tenant_id, c.name, c.disabled, c.opened, c.closed,
           case when c.disabled is not null then
                waypost.tell_of_endpoint(c.tenant_id, c.name, 'disabled', c.disabled, %(now)s::timestamptz) end as told
      from changed c
"""


async def write(
    conn: Connection, notes: dict[EndpointKey, Note], *, now: datetime | None = None
) -> Sequence[Change]:
    """Write down what was noted; what it changed. Endpoints that nobody registered have no row, and no change."""
    cursor = await conn.execute(
        NOTE,
        {
            "tenant": [tenant_id for tenant_id, _ in notes],
            "name": [name for _, name in notes],
            "tries": [note.tries for note in notes.values()],
            "failures": [note.failures for note in notes.values()],
            "succeeded": [note.succeeded for note in notes.values()],
            "failed": [note.failed for note in notes.values()],
            "probed": [note.probed for note in notes.values()],
            "pause": [note.pause for note in notes.values()],
            "gone": [note.gone for note in notes.values()],
            "window": WINDOW,
            "tries_min": WINDOW_TRIES_MIN,
            "ratio": FAILING_RATIO,
            "open_first": OPEN_FIRST,
            "open_max": OPEN_MAX,
            "now": now,
        },
    )
    changes = [Change(*row[:5]) for row in await cursor.fetchall()]
    return [change for change in changes if change.disabled or change.opened or change.closed]


GUARDED: Final[LiteralString] = """
    select exists (select 1 from waypost.endpoint where rate is not null or open_until is not null)
"""


async def guarded(conn: Connection) -> bool:
    """Whether a claim must look at rates and circuits: whether any endpoint has one."""
    row = await (await conn.execute(GUARDED)).fetchone()
    return row is not None and bool(row[0])
