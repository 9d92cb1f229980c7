"""What a bench begins from: executions that wait, made through the doors that the parts themselves use."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import uuid4

import psycopg

from contracts.envelope import Envelope, encode_structured
from contracts.identifiers import execution_key, message_id, uuid7
from migrations import runner
from orchestrator.core.fact import Fact
from orchestrator.store import commits, definitions, executions, starts, workers
from orchestrator.store.commits import NewMessage, Turn
from orchestrator.store.database import Connection, connection_arguments
from orchestrator.store.executions import Claim
from orchestrator.store.starts import NewExecution
from relay import outbox
from relay.delivery import Answer, Delivered

FLOW: Final = ("bench", "1")
ENDPOINT: Final = "service"
COMMAND: Final = "bench.act"
BATCH: Final = 100
HOUR: Final = timedelta(hours=1)
TAKEN: Final = Answer(status=202, reached=True)


class World:
    """One worker's hands in a migrated database: it starts, claims and commits as the worker does."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.me = str(uuid4())

    @classmethod
    async def on(cls, dsn: str) -> World:
        """Migrates the database at `dsn`. Its connection is for the caller to close."""
        with psycopg.connect(dsn, autocommit=True) as conn:
            runner.migrate(conn)
        world = cls(await Connection.connect(dsn, **connection_arguments(dsn, name="bench")))
        await definitions.publish(world.conn, [definitions.Definition(*FLOW)])
        await workers.register(world.conn, me=world.me, lease=HOUR, host="", definitions=[])
        return world

    async def start(self, number: int) -> None:
        """`number` executions that are due."""
        started = json.dumps({"input": {"number": 1}, "definition": FLOW[0], "version": FLOW[1], "seed": "0"})
        new = [
            NewExecution(
                1, str(uuid7(at=datetime.now(UTC), chance=os.urandom(10))), *FLOW, None, DIGEST, started, ""
            )
            for _ in range(number)
        ]
        await starts.start(self.conn, new)

    async def claim(self, limit: int) -> list[Claim]:
        return await executions.claim(self.conn, me=self.me, definitions=[FLOW], limit=limit)

    async def wait(self, claims: Sequence[Claim], *, due: datetime | None) -> None:
        """Let each of `claims` wait for mail, and for `due` when it is not None."""
        await commits.commit(self.conn, [self._turn(claim, "asked", due=due) for claim in claims], me=self.me)

    async def ask(self, claims: Sequence[Claim]) -> None:
        """Let each of `claims` send one command and wait for its reply."""
        turns = [self._turn(claim, "asked", due=None) for claim in claims]
        for turn in turns:
            turn.messages = [command_of(turn)]
        await commits.commit(self.conn, turns, me=self.me)

    async def finish(self, claims: Sequence[Claim]) -> None:
        turns = [self._turn(claim, "finished", due=None, status="completed") for claim in claims]
        await commits.commit(self.conn, turns, me=self.me)

    async def send(self, limit: int) -> list[outbox.Message]:
        """Claim messages and settle them as delivered, as the relay does: their services have said 202."""
        messages = await outbox.claim(
            self.conn, token=uuid4(), limit=limit, room=limit, busy={}, timeout_max=HOUR, margin=HOUR
        )
        await outbox.deliver(
            self.conn, [outbox.Result(message, TAKEN, Delivered(), None) for message in messages]
        )
        return messages

    def _turn(self, claim: Claim, kind: str, *, due: datetime | None, status: str = "open") -> Turn:
        fact = Fact(claim.position + 1, kind, "act", {}, claim.at, text="{}")
        return Turn(
            tenant=1,
            execution=claim.execution,
            fence=claim.fence,
            position=claim.position,
            epoch=claim.epoch,
            facts=[fact],
            mail=0,
            orders=0,
            status=status,
            undoing=False,
            release=True,
            due=due,
            guard=None,
            asks=kind == "asked",
        )


DIGEST: Final = hashlib.sha256(b"{}").digest()


def command_of(turn: Turn) -> NewMessage:
    """The command of a turn, with the attributes that every command has."""
    at = turn.facts[0].at
    identity = message_id(turn.execution, 0, "act", at=at)
    key = execution_key(turn.execution, 0, "act")
    envelope = Envelope(
        id=str(identity),
        source=f"/waypost/executions/{turn.execution}",
        type=COMMAND,
        subject=turn.execution,
        time=at.astimezone(UTC).isoformat(),
        datacontenttype="application/json",
        data={"order": "order-1", "amount": 4200},
        extensions={"correlationid": turn.execution, "idempotencykey": key},
    )
    return NewMessage(
        message_id=identity,
        path="act",
        endpoint=ENDPOINT,
        lane=key,
        body=encode_structured(envelope),
        at_most_once=False,
        expires_at=at + 24 * HOUR,
    )
