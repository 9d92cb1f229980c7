"""A process dies right before or right after anything that it commits, sends or answers; or it goes on, and the
database's answer to its commit does not reach it. Nothing is lost by it, and nothing is done twice.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from orchestrator import Context
from orchestrator.workflow import Workflow
from tests.cluster import Cluster
from tests.crash import flows, statements
from tests.crash.points import FOUND, SERVICES_OWN, Point
from tests.crash.scenarios import FAMILY, PICKUP, REFUSED, SCENARIOS, Place
from tests.crash.stand import stands
from tests.crash.survey import COMMIT, DEATHS, Survey, crash, survey
from tests.evidence import Evidence

STANDS: Final = 4
"""Deployments at once: most of the time each waits for a lease to end."""
FEW_STANDS: Final = 3

OF_TRACES: Final = (REFUSED, PICKUP)
"""Orders that come to every kind of span."""

ELSEWHERE: Final = "tests/crash/test_crashed_commands.py"
TRACED: Final = frozenset(
    {
        "orchestrator.store.commits.COMMIT_MUTEXES_TRACED",
        "orchestrator.store.commits.COMMIT_TRACED",
        "orchestrator.store.spans.DROP_OLD",
        "orchestrator.store.spans.EXPORTED",
        "orchestrator.store.spans.TAKE",
        "receiver.inbox.POST_TRACED",
        "relay.outbox.RECORD_TRACED",
    }
)
"""Statements of deployments that have a collector; all else is as it is without one."""
MARKED: Final = "as without a collector; that its turns are marked: tests/telemetry/test_tracing.py"
APPLICATIONS: Final = (
    "part of an application's own transaction, which it gives again; tests/store/test_errands.py"
)
BY_PAGES: Final = (
    "a page of `payloads rekey`; begun again, it goes on with what is left (tests/engine/test_sealed.py)"
)
REMOVED: Final = "one transaction, after which there is no such endpoint: tests/relay/test_told.py"
KEPT_APART: Final = "what no order of ours comes to; tests/receiver/test_quarantine.py says it again"
GUARDED: Final = "the claim while an endpoint has a rate or an open circuit: tests/relay/test_health.py"
BY_PEOPLE: Final = (
    "what people do about dead letters; said again, it does nothing more: tests/cli/test_outbox.py"
)
IN_SEQUENCE: Final = (
    "for senders whose events come in the order of their numbers: tests/receiver/test_order.py"
)
NOT_HERE: Final = {
    "migrations.runner.BOOTSTRAP": ELSEWHERE,
    "migrations.runner.RECORD": ELSEWHERE,
    "orchestrator.store.endpoints.DISABLE": ELSEWHERE,
    "orchestrator.store.endpoints.DISCARD": REMOVED,
    "orchestrator.store.endpoints.ENABLE": ELSEWHERE,
    "orchestrator.store.endpoints.FORGET": REMOVED,
    "orchestrator.store.endpoints.REMOVE": REMOVED,
    "orchestrator.store.endpoints.UNSUBSCRIBE": REMOVED,
    "orchestrator.store.endpoints.SET": ELSEWHERE,
    "orchestrator.store.inbox.BLAME": KEPT_APART,
    "orchestrator.store.inbox.PUT_CONTRACT": ELSEWHERE,
    "orchestrator.store.inbox.RELEASE": KEPT_APART,
    "orchestrator.store.inbox.REMOVE_CONTRACT": ELSEWHERE,
    "orchestrator.store.payloads.WRITE_DELIVERY": BY_PAGES,
    "orchestrator.store.payloads.WRITE_INBOX": BY_PAGES,
    "orchestrator.store.payloads.WRITE_JOURNAL": BY_PAGES,
    "orchestrator.store.payloads.WRITE_OUTBOX": BY_PAGES,
    "orchestrator.store.payloads.WRITE_QUARANTINE": BY_PAGES,
    "orchestrator.store.payloads.WRITE_TASK": BY_PAGES,
    "orchestrator.store.outbox.ADVANCE": BY_PEOPLE,
    "orchestrator.store.outbox.COPY": BY_PEOPLE,
    "orchestrator.store.outbox.DISCARD": BY_PEOPLE,
    "orchestrator.store.outbox.PUT_BACK": BY_PEOPLE,
    "orchestrator.store.outbox.SKIP": BY_PEOPLE,
    "orchestrator.store.registry.ADD_ENDPOINT": ELSEWHERE,
    "orchestrator.store.registry.REFER": "given again, it names the secret once more: tests/relay/test_particulars.py",
    "orchestrator.store.registry.ADD_SENDER": ELSEWHERE,
    "orchestrator.store.registry.EXPIRE_SECRETS": ELSEWHERE,
    "orchestrator.store.registry.FORGET_SECRETS": ELSEWHERE,
    "orchestrator.store.registry.REPLACE_ENDPOINT": ELSEWHERE,
    "orchestrator.store.registry.REPLACE_SENDER": ELSEWHERE,
    "orchestrator.store.registry.SEAL": ELSEWHERE,
    "orchestrator.store.registry.SET_SENDER": ELSEWHERE,
    "orchestrator.store.subscriptions.ADD": ELSEWHERE,
    "orchestrator.store.subscriptions.REMOVE": ELSEWHERE,
    "orchestrator.store.commits.COMMIT_EMITTING_TRACED": MARKED,
    "orchestrator.store.commits.COMMIT_PUBLISHING_TRACED": MARKED,
    "orchestrator.store.commits.COMMIT_TASKED_TRACED": MARKED,
    "orchestrator.store.commits.COMMIT_WAITS_TRACED": MARKED,
    "orchestrator.store.errands.PUBLISH": APPLICATIONS,
    "orchestrator.store.errands.SIGNAL": APPLICATIONS,
    "orchestrator.store.errands.START": APPLICATIONS,
    "orchestrator.store.terminating.LET_GO": ELSEWHERE,
    "orchestrator.store.terminating.TERMINATE": ELSEWHERE,
    "orchestrator.store.versions.ALONE": ELSEWHERE,
    "orchestrator.store.versions.SHARE": ELSEWHERE,
    "orchestrator.store.versions.UNSHARE": ELSEWHERE,
    "orchestrator.embedded.server.CREATE_DATABASE": "`dev` looks at each start whether there is one to create",
    "relay.outbox.CLAIM_GUARDED": GUARDED,
    "receiver.quarantine.ENTER": IN_SEQUENCE,
    "receiver.quarantine.KEEP": KEPT_APART,
    "receiver.streams.ADVANCE": IN_SEQUENCE,
    "receiver.streams.CALL_NEXT": IN_SEQUENCE,
    "receiver.streams.LEAVE_OUT": IN_SEQUENCE,
    "receiver.streams.LET_IN": IN_SEQUENCE,
    "receiver.streams.LOCK": IN_SEQUENCE,
    "receiver.streams.PUT_OFF": IN_SEQUENCE,
    "receiver.streams.STEP_OUT": IN_SEQUENCE,
    "receiver.memory.FORGET": "one statement by itself, when a service likes; the product never says it",
}
"""Statements that write, and that a deployment does not come to when it serves orders; with where, or why."""

NOT_SENT: Final = {
    "orchestrator.simulators.provider.Provider._post": "somebody else, whom tests need: tests/simulators",
    "receiver.fetching.Fetcher._got": "asks for data and changes nothing: tests/participant/test_fetching.py",
}
"""What sends and does not come to it here; with where, or why."""

TELLING: Final = (
    Point("client", "commit", "orchestrator.store.starts.START", "", "after"),
    Point("worker", "commit", "orchestrator.store.workers.REGISTER", "", "lost"),
    Point("worker", "commit", COMMIT, "ended charge", "before"),
    Point("worker", "commit", COMMIT, "ended reserve", "lost"),
    Point("relay", "commit", "relay.outbox.CLAIM", FOUND, "lost"),
    Point("relay", "send", "relay.wire.Wire._post", "bank.charge", "sent"),
    Point("receiver", "commit", "receiver.inbox.POST", "stock.reserve.done", "after"),
    Point("stock", "commit", "receiver.memory.SETTLE", "stock.reserve", "before"),
)
"""Those at which an engine that is careless loses something, or does it twice."""


COMMIT_OF_A_FAMILY: Final = (
    f"orchestrator.store.families.LOCK+{COMMIT}_WAITS+orchestrator.store.families.AFTER"
)
OF_A_FAMILY: Final = (
    Point("worker", "commit", COMMIT_OF_A_FAMILY, "asked packed", "lost"),
    Point("worker", "commit", COMMIT_OF_A_FAMILY, "ended reserve", "before"),
    Point("worker", "commit", COMMIT_OF_A_FAMILY, "ended within.1/limit", "lost"),
    Point("worker", "commit", COMMIT_OF_A_FAMILY, "cancel_asked", "before"),
)


async def test_every_commit_send_and_answer_of_ours_is_a_crash_point(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with stands(cluster, tmp_path, FEW_STANDS) as some:
        found = await survey(some, SCENARIOS, deaths=())

    points = {place.point for place in found.places}
    commits = [point for point in points if point.door == "commit"]
    passed = {name: whens(commits, name) for point in commits for name in point.name.split("+")}
    assert {*passed} == statements.committing() - {*NOT_HERE} - TRACED
    for name, found_whens in passed.items():
        assert found_whens == {"before", "after"} | (set() if name.startswith(SERVICES_OWN) else {"lost"}), (
            name
        )
    assert {point.name for point in points if point.door == "send"} == statements.sending() - {*NOT_SENT}
    assert {point.part for point in points if point.door == "answer"} == {"receiver", "stock", "bank"}


OUTSIDE: Final = frozenset({"deprecate_patch"})
"""It takes away what a flow had, and asks for nothing."""


def test_every_kind_of_ask_is_killed_in_some_scenario() -> None:
    """By what the flows of the scenarios say to their context, and beside it."""
    ordered = {scenario.flow for scenario in SCENARIOS}
    found: dict[str, Workflow[Any, Any]] = {
        flow.name: flow for flow in vars(flows).values() if isinstance(flow, Workflow)
    }
    asked: set[str] = set()
    for name in ordered:
        tree = ast.parse(inspect.getsource(found[name].run))
        asked |= {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and of_context(node)
        }
        asked |= {
            node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg is not None
        }

    kinds = {name for name, _ in inspect.getmembers(Context, callable) if not name.startswith("_")}
    assert kinds - asked == OUTSIDE
    assert {"undo", "mutex", "retry", "unknown"} <= asked


def of_context(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "ctx"


def traced(found: Survey) -> list[Place]:
    """Those at which something is written for a collector."""
    return [place for place in found.places if place.point.name in TRACED]


def whens(commits: list[Point], name: str) -> set[str]:
    return {point.when for point in commits if name in point.name.split("+")}


@pytest.mark.proof
async def test_every_commit_for_a_collector_is_a_crash_point(cluster: Cluster, tmp_path: Path) -> None:
    async with stands(cluster, tmp_path, 1, traced=True) as some:
        found = await survey(some, OF_TRACES, deaths=())

    points = [place.point for place in traced(found)]
    passed = {name: whens(points, name) for name in TRACED}
    assert passed == {name: {"before", "after", "lost"} for name in TRACED}


@pytest.mark.proof
async def test_a_death_at_a_commit_of_a_family_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Of those that begin a child, tell it to end, or tell its parent that it has."""
    async with stands(cluster, tmp_path, FEW_STANDS) as some:
        found = await survey(some, [FAMILY], deaths=())
        places = [place for place in found.places if place.point in OF_A_FAMILY]
        wrong = await crash(some, places, found.outcomes)

    assert {place.point for place in places} == {*OF_A_FAMILY}
    assert not wrong, "\n".join(wrong)


async def test_at_the_most_telling_points_a_death_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    async with stands(cluster, tmp_path, FEW_STANDS) as some:
        found = await survey(some, [REFUSED], deaths=())
        places = [place for place in found.places if place.point in TELLING]
        wrong = await crash(some, places, found.outcomes)

    assert {place.point for place in places} == {*TELLING}
    assert not wrong, "\n".join(wrong)


@pytest.mark.proof
@pytest.mark.parametrize("parts", ["relay", "worker", "stock bank mill", "receiver client"])
async def test_wherever_a_process_dies_all_ends_as_if_it_had_not(
    cluster: Cluster, tmp_path: Path, parts: str, evidence: Evidence
) -> None:
    async with stands(cluster, tmp_path, STANDS) as some:
        found = await survey(some, SCENARIOS, deaths=DEATHS)
        places = [place for place in found.places if place.point.part in parts.split()]
        died: Counter[str] = Counter()
        wrong = await crash(some, places, found.outcomes, died=died, goes_on=evidence.goes_on)

    evidence.did(f"{died.total()} of {len(places)} points of {parts}: {dict(sorted(died.items()))}")
    assert {place.point.part for place in places} == {*parts.split()}
    assert not wrong, "\n".join(wrong)


@pytest.mark.proof
async def test_wherever_a_process_dies_a_collector_gets_all_that_happened(
    cluster: Cluster, tmp_path: Path, evidence: Evidence
) -> None:
    async with stands(cluster, tmp_path, STANDS, traced=True) as some:
        found = await survey(some, OF_TRACES, deaths=())
        places = traced(found)
        died: Counter[str] = Counter()
        wrong = await crash(some, places, found.outcomes, died=died, goes_on=evidence.goes_on)

    evidence.did(f"{died.total()} of {len(places)} points with a collector: {dict(sorted(died.items()))}")
    assert {place.point.name for place in places} == TRACED
    assert not wrong, "\n".join(wrong)
