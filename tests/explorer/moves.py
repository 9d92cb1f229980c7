"""What the programs of races are made of: the project's own functions, and the worlds that they begin in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from contracts.outcome import Outcome
from orchestrator.store import commits, executions, starts, workers
from orchestrator.store.commits import NewMessage, Turn
from orchestrator.store.database import Connection
from orchestrator.store.starts import NewExecution
from receiver import inbox
from receiver.inbox import MailItem, Posted
from relay import outbox
from relay.delivery import Answer, Delivered, Refused, Retry, Verdict
from relay.outbox import Message, Result
from tests.explorer.sessions import Program, Session
from tests.store.world import FLOW, HOUR, Held, asked, begun, claim_all, commit, message, worker

# -- one call, one transaction -----------------------------------------------------------------------------


def alone(call: Callable[[Connection], Awaitable[Any]]) -> Program:
    """A program of one transaction that makes one call; it returns what the call did."""

    async def program(session: Session) -> Any:
        async with session.transaction() as conn:
            return await call(conn)

    return program


def post(*items: MailItem) -> Program:
    """The receiver, or whoever else has mail; it returns the outcomes."""

    async def call(conn: Connection) -> list[str]:
        return outcomes_of(await inbox.post(conn, items))

    return alone(call)


def outcomes_of(posted: Sequence[Posted]) -> list[str]:
    return [one.outcome for one in posted]


def commits_of(*turns: tuple[Held, Turn]) -> Program:
    """A worker commits turns, in this order; it returns which matched."""

    async def call(conn: Connection) -> list[UUID]:
        matched = await commits.commit(conn, [turn for _, turn in turns], me=turns[0][0].me)
        return [holder.execution for holder, _ in turns if str(holder.execution) in matched]

    return alone(call)


def commit_of(holder: Held, turn: Turn) -> Program:
    """A worker commits one turn; whether it matched."""

    async def call(conn: Connection) -> bool:
        return await commit(conn, holder, turn)

    return alone(call)


def start(*new: NewExecution) -> Program:
    async def call(conn: Connection) -> list[str]:
        return [outcome for outcome, _ in await starts.start(conn, new)]

    return alone(call)


def new_execution(key: str | None, given: int, *, execution: UUID | None = None) -> NewExecution:
    """An execution to be started with the input `given`."""
    return NewExecution(
        tenant=1,
        execution=str(execution or uuid4()),
        definition=FLOW[0],
        version=FLOW[1],
        business_key=key,
        digest=bytes([given]) * 32,
        started=f'{{"input": {given}}}',
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


def claim(me: str, *, limit: int = 100) -> Program:
    """A worker takes what is due; it returns which."""

    async def call(conn: Connection) -> list[UUID]:
        taken = await executions.claim(conn, me=me, definitions=[FLOW], limit=limit)
        return [UUID(one.execution) for one in taken]

    return alone(call)


async def take_over(conn: Connection) -> list[UUID]:
    return [UUID(execution) for execution in await workers.take_over(conn, limit=10)]


# -- the relay ---------------------------------------------------------------------------------------------

OVER: Final = -timedelta(seconds=1)


async def claim_messages(
    conn: Connection, *, lease: timedelta = HOUR, limit: int = 100, token: UUID | None = None
) -> list[Message]:
    """The relay's claim; with a `lease` in the past, nobody settles it in time."""
    return await outbox.claim(
        conn,
        token=token or uuid4(),
        limit=limit,
        room=100,
        busy={},
        timeout_max=timedelta(0),
        margin=lease,
    )


def result(message: Message, verdict: Verdict) -> Result:
    """What a try brought, without a line for the log of tries."""
    return Result(message, Answer(reached=verdict.reached), verdict, started_at=None)


DELIVERED: Final = Delivered()
REACHED: Final = Retry(timedelta(0), reached=True)
UNREACHED: Final = Retry(timedelta(0), reached=False)
REFUSED: Final = Refused(Outcome("refused", code="no"))


async def settled(session: Session, *results: Result) -> list[str]:
    """The relay settles, in its two transactions; the states that messages came to whose claims were not over."""
    states: dict[tuple[int, UUID], str] = {}
    arrived = [one for one in results if isinstance(one.verdict, Delivered)]
    if arrived:
        async with session.transaction() as conn:
            states = await outbox.deliver(conn, arrived)
    rest = [one for one in results if one.message.key not in states]
    if rest:
        async with session.transaction() as conn:
            states |= await outbox.end(conn, rest)
    return [states[one.message.key] for one in results if one.message.key in states]


def settle(*results: Result) -> Program:
    return lambda session: settled(session, *results)


async def expire_claims(conn: Connection) -> int:
    return await outbox.expire_claims(conn, limit=100)


# -- worlds ------------------------------------------------------------------------------------------------


async def owned(conn: Connection, number: int) -> list[Held]:
    """So many executions in the hands of one worker, in the order of their ids."""
    for _ in range(number):
        await begun(conn)
    return sorted(await claim_all(conn, await worker(conn)), key=lambda holder: holder.execution)


async def asks(
    conn: Connection,
    holder: Held,
    path: str = "pay",
    *,
    at_most_once: bool = False,
    expires_at: datetime | None = None,
    new: NewMessage | None = None,
) -> UUID:
    """A turn that asks for something, and keeps its execution; the message."""
    new = new or message(path, at_most_once=at_most_once, expires_at=expires_at)
    assert await commit(conn, holder, holder.turn(asked(path), messages=[new], release=False))
    holder.position += 1
    return new.message_id


async def owned_with_message(conn: Connection, *, at_most_once: bool = False) -> tuple[Held, UUID]:
    """An execution in a worker's hands, and its message, which is due."""
    [holder] = await owned(conn, 1)
    return holder, await asks(conn, holder, at_most_once=at_most_once)


async def sleeping_with_message(conn: Connection, *, at_most_once: bool = False) -> tuple[UUID, UUID]:
    """An execution that waits for what becomes of its message, and the message, which is due."""
    holder, message_id = await owned_with_message(conn, at_most_once=at_most_once)
    assert await commit(conn, holder, holder.turn())
    return holder.execution, message_id


def take_back(holder: Held, *messages: UUID) -> Turn:
    return holder.turn(("withdrawn", "pay", {}), take_back=messages)
