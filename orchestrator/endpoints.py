"""What operators say about endpoints that are registered: how messages are delivered there, and whether at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

from contracts.addresses import Network
from contracts.errors import shown
from orchestrator.registry import (
    TENANT,
    TIMEOUT_MAX,
    TIMEOUT_MIN,
    NotRegistered,
    UnknownEndpoint,
    name_problems,
)
from orchestrator.store import endpoints as store
from orchestrator.store.database import Connection
from orchestrator.store.endpoints import EndpointState
from relay.addresses import check_url
from relay.particulars import header_problems, tls_problems

CONCURRENCY_MAX: Final = 1_000  # tries in flight to one endpoint, in each relay
RATE_MAX: Final = 100_000  # messages a second, and of one burst


async def read(conn: Connection, name: str, *, tenant: int = TENANT) -> EndpointState:
    """Raises UnknownEndpoint."""
    found = await store.read(conn, name, tenant=tenant)
    if found is None:
        raise UnknownEndpoint(name)
    return found


async def change(
    conn: Connection,
    name: str,
    changes: Mapping[str, Any],
    *,
    allow: Iterable[Network] = (),
    tenant: int = TENANT,
) -> None:
    """Set what `changes` names; None is the default. Relays know within seconds.

    Of url, timeout, replies_from, schedule (as JSON), concurrency, rate, burst, disable_after, on_dead, ordered_by,
    headers, idempotency, mode, tls. Raises NotRegistered with every problem, UnknownEndpoint.
    """
    problems = problems_of(changes, allow)
    if changes.get("ordered_by") is not None and (await read(conn, name, tenant=tenant)).kind != "command":
        problems.append(
            "ordered: expected an endpoint for commands; of events each `waypost subscription add` says it"
        )
    if problems:
        raise NotRegistered(f"endpoint {shown(name)}", problems)
    written = {
        key: f"{value.total_seconds()} s" if isinstance(value, timedelta) else value
        for key, value in changes.items()
    }
    if not await store.change(conn, name, written, tenant=tenant):
        raise UnknownEndpoint(name)


def problems_of(changes: Mapping[str, Any], allow: Iterable[Network]) -> list[str]:
    problems: list[str] = []
    if (url := changes.get("url")) is not None:
        problems += [f"url: {problem}" for problem in check_url(url, allow=allow)]
    if (sender := changes.get("replies_from")) is not None:
        problems += [f"replies-from: {problem}" for problem in name_problems(sender)]
    for name, least, most, words in (
        ("timeout", TIMEOUT_MIN, TIMEOUT_MAX, "1ms to 5m"),
        ("concurrency", 1, CONCURRENCY_MAX, f"1 to {CONCURRENCY_MAX}"),
        ("rate", 1e-6, RATE_MAX, f"more than 0, at most {RATE_MAX} a second"),
        ("burst", 1, RATE_MAX, f"1 to {RATE_MAX}"),
    ):
        value = changes.get(name)
        if value is not None and not least <= value <= most:
            problems.append(f"{name}: expected {words}")
    if "headers" in changes:
        problems += header_problems(changes["headers"])
    if "tls" in changes:
        problems += tls_problems(changes["tls"])
    if (after := changes.get("disable_after")) is not None and after <= timedelta(0):
        problems.append("disable-after: expected more than nothing")
    return problems


async def enable(conn: Connection, name: str, *, tenant: int = TENANT) -> None:
    """Send what waits, and forget that it failed. Raises UnknownEndpoint."""
    if not await store.enable(conn, name, tenant=tenant):
        raise UnknownEndpoint(name)


async def disable(conn: Connection, name: str, *, tenant: int = TENANT) -> None:
    """Send nothing more; what comes is kept, and waits. Raises UnknownEndpoint."""
    if not await store.disable(conn, name, tenant=tenant):
        raise UnknownEndpoint(name)


async def remove(conn: Connection, name: str, *, tenant: int = TENANT) -> int:
    """Take it away; how many events waited for it, which are discarded. What is asked of it from now on cannot be sent.
    Raises UnknownEndpoint.
    """
    discarded = await store.remove(conn, name, tenant=tenant)
    if discarded is None:
        raise UnknownEndpoint(name)
    return discarded
