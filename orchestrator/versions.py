"""How new executions of a flow are shared among its versions."""

from __future__ import annotations

from contracts.errors import Conflict, ContractViolation, NotFound, shown
from contracts.limits import NAME_BYTES_MAX
from orchestrator.core.names import is_name
from orchestrator.registry import TENANT
from orchestrator.store import versions as store
from orchestrator.store.database import Connection


class ShareInvalid(ContractViolation):
    """The version or the share is none."""

    code = "share-invalid"


class UnknownShare(NotFound):
    """The version has no share of its own."""

    code = "unknown-share"


class SharesFull(Conflict):
    """The versions of a flow would get more than all new executions."""

    code = "shares-full"


def named(text: str) -> tuple[str, str]:
    """Flow and version of FLOW@VERSION. Raises ShareInvalid."""
    flow, at, version = text.partition("@")
    if not (at and is_name(flow, NAME_BYTES_MAX) and is_name(version, NAME_BYTES_MAX)):
        raise ShareInvalid(f"version {shown(text)}: expected FLOW@VERSION such as order@2")
    return flow, version


async def share(conn: Connection, flow: str, version: str, percent: int, *, tenant: int = TENANT) -> None:
    """Begin so many of a hundred new executions of `flow` with this version, which may become known later. The rest
    begins with the newest version without a share. Raises ShareInvalid, SharesFull.
    """
    if not 0 <= percent <= 100:
        raise ShareInvalid(f"share of {flow}@{version}: expected 0 to 100, found {percent}")
    others = await store.share(conn, flow, version, percent, tenant=tenant)
    if others + percent > 100:
        raise SharesFull(
            f"share of {flow}@{version}: expected at most {100 - others}, since other versions of {flow} have"
            f" {others}, found {percent}"
        )


async def unshare(conn: Connection, flow: str, version: str, *, tenant: int = TENANT) -> None:
    """The version has no share of its own any more. Raises UnknownShare."""
    if not await store.unshare(conn, flow, version, tenant=tenant):
        raise UnknownShare(f"{flow}@{version} has no share of its own; `waypost flow list` shows who has")
