"""What journals say about code that was not there when they were written: would it go on where they end?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from contracts.errors import UnknownFlow
from orchestrator.core.errors import PAYLOAD_UNAVAILABLE, UNSTORABLE, Halt
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.core.redaction import Line, Redaction
from orchestrator.engine.inputs import stopped_by
from orchestrator.flows import Flow, Flows
from orchestrator.objects.large import Large, PartGone, whole_facts
from orchestrator.store import executions, versions
from orchestrator.store.database import Connection
from orchestrator.store.executions import UNREADABLE
from orchestrator.store.versions import OpenRow

PAGE_MAX: Final = 100
"""Executions whose journals are read at once."""


class Would(StrEnum):
    """What would become of an open execution."""

    GO_ON = "goes on"
    """Its journal replays: the code asks for all that was asked for."""
    RECOVER = "would go on"
    """It is stopped, and this code agrees with its journal: `waypost resume` lets it go on."""
    STAY_HELD = "stays held"
    """It is stopped, and would be again."""
    BE_HELD = "would be held"
    """This code says something else than the journal, or cannot go on."""
    WAIT = "would wait"
    """No module here has its version, so no worker with these modules would take it."""


FAULTS: Final = frozenset({Would.BE_HELD, Would.WAIT})
"""What a deploy should not bring."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What would become of one execution, and why: the first difference, as the code of a hold and in words."""

    execution: OpenRow
    would: Would
    code: str | None = None
    reason: str | None = None


def replayed(flow: Flow, journal: Sequence[Fact], *, now: datetime) -> tuple[str, str] | None:
    """Code and words of the first difference between a flow's code and a journal; None when there is none. Nothing is
    written, and no step is run.
    """
    bad = next((fact for fact in journal if fact.kind == UNREADABLE), None)
    if bad is not None:
        return bad.data.get(
            "code", UNSTORABLE
        ), f"the journal cannot be read at position {bad.position}: {bad.data['why']}"
    machine = Machine(flow.program, payload_max=Large.bytes_max(), sent_max=Large.bytes_max())
    try:
        machine.replay(journal, now=now)
    except Halt as halt:
        return halt.code, str(halt)
    finally:
        machine.evict()
    return None


def found(row: OpenRow, flow: Flow | None, journal: Sequence[Fact], *, now: datetime) -> Finding:
    """What would become of an execution under the code of `flow`, None when nobody has it."""
    if flow is None:
        return Finding(row, Would.WAIT, "no-version", f"no module here has {row.definition}@{row.version}")
    stopped = stopped_by(journal) is not None
    difference = replayed(flow, journal, now=now)
    if difference is None:
        return Finding(row, Would.RECOVER if stopped else Would.GO_ON)
    return Finding(row, Would.STAY_HELD if stopped else Would.BE_HELD, *difference)


async def check(
    conn: Connection,
    flows: Flows,
    *,
    tenant: int,
    progress: Callable[[int, int], None],
    said: Callable[[Finding], None],
    under: Flow | None = None,
) -> Counter[Would]:
    """Replay every open journal of the flows' names against the code of `flows`, each under its own version; or all of
    one flow, whatever their version, under the code of `under`. How many there are of which kind.

    `said` is told of each that does more than go on, `progress` how many are done and how many there are. Only reads.
    Raises StoreAway.
    """
    counted = Counter[Would]()
    names = {flow.name for flow in flows} if under is None else {under.name}
    wanted = await versions.open_executions(conn, sorted(names), tenant=tenant)
    for begin in range(0, len(wanted), PAGE_MAX):
        page = await versions.rows(conn, wanted[begin : begin + PAGE_MAX], tenant=tenant)
        journals = await executions.journals(conn, [(tenant, row.execution_id) for row in page])
        now = datetime.now(UTC)
        for row in page:
            flow = under or held_by(flows, row)
            journal = await completed(journals[row.execution_id], tenant=tenant)
            finding = found(row, flow, journal, now=now)
            counted[finding.would] += 1
            if finding.would is not Would.GO_ON:
                said(shown(finding, journal, flow))
        progress(begin + len(page), len(wanted))
    return counted


async def completed(journal: list[Fact], *, tenant: int) -> list[Fact]:
    """`journal` with what is in the payload store; else with a fact that cannot be read. Raises StoreAway."""
    try:
        await whole_facts(tenant, journal)
    except PartGone as gone:
        data = {"why": str(gone), "code": PAYLOAD_UNAVAILABLE}
        return [Fact(gone.position, UNREADABLE, "", data, journal[0].at), *journal]
    return journal


def shown(finding: Finding, journal: Sequence[Fact], flow: Flow | None) -> Finding:
    """`finding` as people may see it: what is Sensitive in the journal does not stand in its words."""
    declared = None if flow is None else flow.sensitive
    text = Redaction([Line(fact.kind, fact.path, fact.data) for fact in journal], declared).text
    return replace(finding, reason=None if finding.reason is None else text(finding.reason))


def held_by(flows: Flows, row: OpenRow) -> Flow | None:
    try:
        return flows.get(row.definition, row.version)
    except UnknownFlow:
        return None
