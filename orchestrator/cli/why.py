"""`waypost why`: the sentence, and what a person can do."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from uuid import UUID

from contracts.errors import UnknownExecution
from orchestrator import bootstrap
from orchestrator.cli.output import Exit, as_json, plain, say
from orchestrator.explanation import Explanation
from orchestrator.settings import Settings
from orchestrator.store.situation import Situation, situation
from orchestrator.why import explain

TENANT = 1


def why(args: Namespace, settings: Settings) -> int:
    it = bootstrap.run(look_at(args.id, settings))
    told = explain(it, it.around.now)
    if args.output == "json":
        say(as_json({"execution_id": it.row.execution_id, **asdict(told)}))
    else:
        say("\n".join(lines(told)))
    return Exit.OK


async def look_at(execution: UUID, settings: Settings) -> Situation:
    async with bootstrap.connection(settings) as conn:
        found = await situation(conn, str(execution), tenant=TENANT)
    if found is None:
        raise UnknownExecution(str(execution))
    return found


def lines(told: Explanation) -> Iterator[str]:
    yield f"{told.code}: {plain(told.sentence)}"
    yield from (f"  do: {plain(one)}" for one in told.do)
    for other in told.also:
        yield from lines(other)
