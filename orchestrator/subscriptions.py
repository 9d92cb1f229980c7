"""Who gets published events: an endpoint of the kind `event` subscribes to types, each by its exact name."""

from __future__ import annotations

from contracts.errors import Conflict, ContractViolation, NotFound, shown
from contracts.limits import IDENTITY_BYTES_MAX
from orchestrator.core.names import is_name
from orchestrator.registry import TENANT
from orchestrator.store import subscriptions as store
from orchestrator.store.database import Connection


class SubscriptionInvalid(ContractViolation):
    """The type is no type that an event can have."""

    code = "subscription-invalid"


class UnknownEndpoint(NotFound):
    """No endpoint has that name."""

    code = "unknown-endpoint"


class UnknownSubscription(NotFound):
    """The endpoint does not get events of that type."""

    code = "unknown-subscription"


class TakesCommands(Conflict):
    """The endpoint is one that commands are posted to, whose answers are replies."""

    code = "takes-commands"


async def subscribe(conn: Connection, type: str, endpoint: str, *, tenant: int = TENANT) -> bool:  # noqa: A002  # its name on the wire
    """Send what is published from now on as `type` to `endpoint`, too; whether that is new.

    Raises SubscriptionInvalid, UnknownEndpoint, TakesCommands.
    """
    if not is_name(type, IDENTITY_BYTES_MAX):
        raise SubscriptionInvalid(
            f"type {shown(type)}: expected 1 to {IDENTITY_BYTES_MAX} bytes of printable text"
        )
    kind = await store.kind_of(conn, endpoint, tenant=tenant)
    if kind is None:
        raise UnknownEndpoint(f"no endpoint is named {shown(endpoint)}; `waypost endpoint list` shows them")
    if kind != "event":
        raise TakesCommands(
            f"endpoint {shown(endpoint)}: expected one of the kind event, found one of the kind {kind};"
            " register another: `waypost endpoint add NAME URL --kind event`"
        )
    return await store.add(conn, type, endpoint, tenant=tenant)


async def unsubscribe(conn: Connection, type: str, endpoint: str, *, tenant: int = TENANT) -> None:  # noqa: A002  # as above
    """Send it no further events of that type; those that were published before still go. Raises UnknownSubscription."""
    if not await store.remove(conn, type, endpoint, tenant=tenant):
        raise UnknownSubscription(
            f"endpoint {shown(endpoint)} does not get events of type {shown(type)};"
            " `waypost subscription list` shows who gets which"
        )
