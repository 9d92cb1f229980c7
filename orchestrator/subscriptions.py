"""Who gets published events: an endpoint of the kind `event` subscribes to types, and to attributes.

A type is an exact one, or the beginning of one up to a dot and `*`, or `*` alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from contracts.errors import Conflict, ContractViolation, NotFound, shown
from contracts.limits import IDENTITY_BYTES_MAX
from orchestrator.core.names import is_name
from orchestrator.registry import TENANT, UnknownEndpoint
from orchestrator.store import subscriptions as store
from orchestrator.store.database import Connection

__all__ = ["UnknownEndpoint"]

PATTERN: Final = re.compile(r"([^*]+\.)?\*")
ATTRIBUTE: Final = re.compile(r"[a-z0-9]{1,64}")


class SubscriptionInvalid(ContractViolation):
    """The type is no type that an event can have."""

    code = "subscription-invalid"


class UnknownSubscription(NotFound):
    """The endpoint does not get events of that type."""

    code = "unknown-subscription"


class TakesCommands(Conflict):
    """The endpoint is one that commands are posted to, whose answers are replies."""

    code = "takes-commands"


async def subscribe(
    conn: Connection,
    type: str,  # noqa: A002  # its name on the wire
    endpoint: str,
    *,
    ordered_by: Literal["key", "execution"] | None = None,
    attributes: Mapping[str, str] | None = None,
    tenant: int = TENANT,
) -> bool:
    """Send what is published from now on as `type` to `endpoint`, too; whether that is new.

    Only events that have all `attributes` (names of the envelope, such as source and subject) as they are here. With
    `ordered_by`, those of one key, or of one execution, arrive in the order in which they were published. Raises
    SubscriptionInvalid, UnknownEndpoint, TakesCommands.
    """
    if "*" in type and not PATTERN.fullmatch(type):
        raise SubscriptionInvalid(
            f"type {shown(type)}: expected an exact type, or * behind a dot at its end (shop.order.*), or * alone"
        )
    for name in attributes or {}:
        if not ATTRIBUTE.fullmatch(name) or name == "data":
            raise SubscriptionInvalid(
                f"attribute {shown(name)}: expected the name of one, of lower-case letters and digits, but data"
            )
    if not is_name(type, IDENTITY_BYTES_MAX):
        raise SubscriptionInvalid(
            f"type {shown(type)}: expected 1 to {IDENTITY_BYTES_MAX} bytes of printable text"
        )
    kind = await store.kind_of(conn, endpoint, tenant=tenant)
    if kind is None:
        raise UnknownEndpoint(endpoint)
    if kind != "event":
        raise TakesCommands(
            f"endpoint {shown(endpoint)}: expected one of the kind event, found one of the kind {kind};"
            " register another: `waypost endpoint add NAME URL --kind event`"
        )
    return await store.add(
        conn, type, endpoint, ordered_by=ordered_by, attributes=attributes or None, tenant=tenant
    )


async def unsubscribe(conn: Connection, type: str, endpoint: str, *, tenant: int = TENANT) -> None:  # noqa: A002  # as above
    """Send it no further events of that type; those that were published before still go. Raises UnknownSubscription."""
    if not await store.remove(conn, type, endpoint, tenant=tenant):
        raise UnknownSubscription(
            f"endpoint {shown(endpoint)} does not get events of type {shown(type)};"
            " `waypost subscription list` shows who gets which"
        )
