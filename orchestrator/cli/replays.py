"""`waypost check-replay`: whether what is open would go on under the code that is here."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import asdict
from typing import Any

from orchestrator import bootstrap, registry, replays, versions
from orchestrator.cli.output import Exit, as_json, note, plain, say
from orchestrator.flows import Flows
from orchestrator.replays import FAULTS, Finding, Would
from orchestrator.settings import Settings


def check_replay(args: Namespace, settings: Settings) -> int:
    flows = bootstrap.flows_of(settings, args.modules)
    findings: list[Finding] = []
    told = findings.append if args.output == "json" else tell
    counted = bootstrap.run(check(flows, args.under, told, settings))
    if args.output == "json":
        counts = {would.name.lower(): counted[would] for would in Would}
        say(as_json({"counts": counts, "findings": [shaped(one) for one in findings]}))
    note(summary(counted))
    return Exit.ERROR if any(counted[would] for would in FAULTS) else Exit.OK


async def check(flows: Flows, under: str | None, told: Any, settings: Settings) -> Counter[Would]:
    flow = None if under is None else flows.get(*versions.named(under))
    async with bootstrap.connection(settings) as conn:
        return await replays.check(
            conn, flows, tenant=registry.TENANT, under=flow, progress=progress, said=told
        )


def progress(done: int, of: int) -> None:
    note(f"{done:,} of {of:,} open executions looked at")


def tell(one: Finding) -> None:
    row = one.execution
    key = f"  key {plain(row.business_key)}" if row.business_key else ""
    why = f" ({one.code})" if one.code else ""
    say(f"{row.execution_id}  {plain(row.definition)}@{plain(row.version)}{key}  {one.would}{why}")
    if one.reason:
        say(f"    {plain(one.reason)}")


def shaped(one: Finding) -> dict[str, Any]:
    return {**asdict(one.execution), "would": one.would.name.lower(), "code": one.code, "reason": one.reason}


def summary(counted: Counter[Would]) -> str:
    """How many executions there are of each kind, in a sentence."""
    words = {
        Would.GO_ON: "go on",
        Would.RECOVER: "are held and would go on when they are resumed",
        Would.STAY_HELD: "are held and would stay so",
        Would.BE_HELD: "would be held",
        Would.WAIT: "would wait, since no module here has their version",
    }
    told = [f"{counted[would]:,} {words[would]}" for would in Would if counted[would]]
    return f"{counted.total():,} open executions of these flows{': ' if told else ''}{', '.join(told)}."
