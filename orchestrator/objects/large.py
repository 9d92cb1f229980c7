"""Parts that are too large for a row: put into the payload store before the commit that names them, and got again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

from contracts import strict_json
from contracts.codec import PayloadKeyMissing, PayloadUnreadable
from contracts.limits import PAYLOAD_BYTES_MAX, PAYLOAD_STORED_BYTES_MAX
from contracts.objects import (
    OBJECTS,
    PARTS,
    ObjectGone,
    Reference,
    part_of,
    references,
    shown_digest,
    with_part,
    without_part,
)
from orchestrator.core.fact import Fact
from orchestrator.objects.kept import Kept
from orchestrator.store.commits import Turn
from orchestrator.store.executions import Mail
from orchestrator.store.families import Family
from orchestrator.store.starts import NewExecution

Json = Any
Document = dict[str, Json]

NAMED: Final = f'"{OBJECTS}"'


class NoStore(ObjectGone):
    """A part is elsewhere, and this process has no store."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"object {shown_digest(digest)}: expected WAYPOST_PAYLOAD_STORE, found none")


class Large:
    """The payload store of this process: set once, where settings become parts. None: nothing is by reference."""

    kept: Kept | None = None

    @classmethod
    def bytes_max(cls) -> int:
        """Of one payload that may be by reference."""
        return PAYLOAD_BYTES_MAX if cls.kept is None else PAYLOAD_STORED_BYTES_MAX

    @classmethod
    async def get(cls, tenant: int, one: Reference) -> bytes:
        """Raises ObjectGone, StoreAway, PayloadKeyMissing, PayloadUnreadable."""
        if cls.kept is None:
            raise NoStore(one.sha256)
        return await cls.kept.get(tenant, one)

    @classmethod
    async def anew(cls, tenant: int, one: Reference) -> Reference:
        """The same, sealed with the newest key. The old object stays: others may name it."""
        plain = await cls.get(tenant, one)
        assert cls.kept is not None, "it was got"
        return await cls.kept.put(tenant, plain)


# ---- to the store ----------------------------------------------------------------------------------------------


def may_be_large(text: str | None) -> bool:
    """Whether a document has room for a part that is too large; a character is at most four bytes."""
    return text is not None and len(text) * 4 > PAYLOAD_BYTES_MAX


def is_large(turn: Turn) -> bool:
    """Whether anything of a turn may have to be put into the store first."""
    family = turn.family
    return any(may_be_large(fact.text) for fact in turn.facts) or (
        bool(family)
        and (
            any(may_be_large(child.started) for child in family.children)
            or any(may_be_large(mail.data) for mail in family.mail)
        )
    )


async def put_turn(kept: Kept, turn: Turn) -> None:
    """Put what is too large into the store, and let the turn name it. Raises StoreAway, StoreDenied; then the turn may
    be put again.
    """
    for fact in turn.facts:
        if may_be_large(fact.text):
            fact.text = await named(kept, turn.tenant, fact.data, fact.text or "")
    if turn.family:
        children = [
            replace(child, started=await named_in(kept, turn.tenant, child.started))
            for child in turn.family.children
        ]
        mail = [replace(one, data=await named_in(kept, turn.tenant, one.data)) for one in turn.family.mail]
        turn.family = Family(children, mail)


async def put_new(kept: Kept, new: Sequence[NewExecution]) -> list[NewExecution]:
    """`new` as their first facts name what is too large. Raises StoreAway, StoreDenied."""
    return [replace(one, started=await named_in(kept, one.tenant, one.started)) for one in new]


async def named_in(kept: Kept, tenant: int, text: str) -> str:
    return await named(kept, tenant, json.loads(text), text) if may_be_large(text) else text


async def named(kept: Kept, tenant: int, said: Document, text: str) -> str:
    """`said`, which is `text`, with references to what is too large."""
    found: Document = {}
    for part, at in PARTS.items():
        value = part_of(said, at)
        if value is None:
            continue
        plain = strict_json.encode(value, what=part).encode()
        if len(plain) > PAYLOAD_BYTES_MAX:
            found[part] = (await kept.put(tenant, plain)).as_json()
            said = without_part(said, at)
    return strict_json.encode({**said, OBJECTS: found}, what="payload") if found else text


# ---- and back --------------------------------------------------------------------------------------------------


async def whole(tenant: int, said: Document) -> Document:
    """A document with all of its parts. Raises ValueError for a reference that is none, ObjectGone, StoreAway,
    PayloadKeyMissing, PayloadUnreadable.
    """
    parts = list(references(said))
    said = {name: item for name, item in said.items() if name != OBJECTS}
    for at, one in parts:
        said = with_part(said, at, json.loads(await Large.get(tenant, one)))
    return said


async def whole_facts(tenant: int, journal: Sequence[Fact]) -> None:
    """Give `journal` the parts that are elsewhere. Raises PartGone, StoreAway."""
    for fact in journal:
        if OBJECTS in fact.data:
            try:
                fact.data = await whole(tenant, fact.data)
            except (ObjectGone, PayloadKeyMissing, PayloadUnreadable, ValueError) as error:
                raise PartGone(f"{fact.kind} at position {fact.position}", error, fact.position) from None


async def whole_mail(tenant: int, mail: Sequence[Mail]) -> list[Mail]:
    """`mail` with the parts that are elsewhere; what cannot be had says so. Raises StoreAway."""
    return [await opened(tenant, one) if is_elsewhere(one) else one for one in mail]


def is_elsewhere(mail: Mail) -> bool:
    """Only what executions tell each other has parts elsewhere: what strangers write is never looked into."""
    return mail.kind == "child" and mail.data is not None and NAMED in mail.data


async def opened(tenant: int, mail: Mail) -> Mail:
    try:
        said: Json = json.loads(mail.data or "null")
        if not isinstance(said, dict) or OBJECTS not in said:
            return mail
        found = await whole(tenant, cast("Document", said))
        return replace(mail, data=strict_json.encode(found, what="mail"))
    except (ObjectGone, PayloadKeyMissing, PayloadUnreadable, ValueError) as error:
        return replace(mail, data=None, gone=str(PartGone(f"mail {mail.number}", error)))


class PartGone(ObjectGone):
    """What stands where cannot be had, and why; `position` is that of the fact."""

    def __init__(self, where: str, why: Exception, position: int = 0) -> None:
        super().__init__(f"{where} names a large payload: {why}")
        self.position = position
