"""Data that an event names instead of carrying them, and the tickets with which they are got.

What is too large for a message stays in the payload store. The event says where its data are, and which they are:

    "dataref": "https://waypost.example/data/d1Q…", "datahash": "sha-256:9f86…", "datasize": 1048576

The signature of the event covers hash and size, so nobody between can give others. The URL ends with a ticket: it names
a fact of a journal whose data these are, until when, and has an HMAC of the installation's key. Who has the ticket may
read these bytes and no other, so it belongs in no log.

Source: CloudEvents, the extension Dataref; RFC 9530, appendix A, for the name of the hash.
"""

from __future__ import annotations

import base64
import hmac
import re
import struct
from dataclasses import dataclass, replace
from datetime import datetime
from typing import ClassVar, Final
from uuid import UUID

from contracts.envelope import ABSENT, Envelope
from contracts.errors import ContractViolation, Unavailable, shown
from contracts.limits import PAYLOAD_STORED_BYTES_MAX
from contracts.objects import digest_of
from contracts.vault import Vault

DATAREF: Final = "dataref"
DATAHASH: Final = "datahash"
DATASIZE: Final = "datasize"
HASH: Final = re.compile(r"sha-256:([0-9a-f]{64})")

TICKET: Final = struct.Struct(">3sIQ16s16s32sIQ")
MARK: Final = b"wd1"
"""Which kind of ticket it is; with it the length divides by three, so that each has one text only."""
TICKET_TEXT: Final = re.compile(r"[A-Za-z0-9_-]{164}")
MAC_LENGTH: Final = 32


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to read the data of `message` until `expires` (seconds since 1970, by the database's clock): part of
    the fact at `position` in the journal of `execution`. `sha256` and `size` are of the bytes that are given out.
    """

    tenant: int
    execution: UUID
    position: int
    message: UUID
    sha256: str
    size: int
    expires: int


class Tickets:
    """Makes tickets with the key of `vault`, and knows those that it has made."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    def issue(self, one: Ticket) -> str:
        said = TICKET.pack(
            MARK,
            one.tenant,
            one.position,
            one.execution.bytes,
            one.message.bytes,
            bytes.fromhex(one.sha256),
            one.size,
            one.expires,
        )
        return base64.urlsafe_b64encode(said + self._vault.mac(said)).decode("ascii")

    def read(self, text: str) -> Ticket | None:
        """None for whatever was not issued; also for one whose time is over it has the ticket."""
        if not TICKET_TEXT.fullmatch(text):
            return None
        whole = base64.urlsafe_b64decode(text)
        said, mac = whole[:-MAC_LENGTH], whole[-MAC_LENGTH:]
        if not hmac.compare_digest(self._vault.mac(said), mac):
            return None
        _, tenant, position, execution, message, digest, size, expires = TICKET.unpack(said)
        return Ticket(
            tenant, UUID(bytes=execution), position, UUID(bytes=message), digest.hex(), size, expires
        )


def seconds_of(at: datetime) -> int:
    """As a ticket has it: never later than `at`."""
    return int(at.timestamp())


def naming(envelope: Envelope, url: str, *, sha256: str, size: int) -> Envelope:
    """`envelope` that names its data instead of carrying them."""
    named = {DATAREF: url, DATAHASH: f"sha-256:{sha256}", DATASIZE: size}
    return replace(envelope, data=ABSENT, extensions={**envelope.extensions, **named})


# ---- for who gets the event ------------------------------------------------------------------------------------


class DataAway(Unavailable):
    """Data that an event names cannot be got now. `fault` is why, as a code; nothing was done."""

    code: ClassVar[str] = "data-away"

    def __init__(self, fault: str, why: str) -> None:
        super().__init__(f"the data that the event names ({fault}: {why})")
        self.fault = fault


class DataWrong(ContractViolation):
    """What an event names as its data is not what it says, or says nothing that can be read: it never will be."""

    code: ClassVar[str] = "data-mismatch"


@dataclass(frozen=True, slots=True)
class Named:
    """Where the data of an event are, and which."""

    url: str
    sha256: str
    size: int


def is_named(event: Envelope) -> bool:
    """Whether an event names its data, and has none."""
    return event.data is ABSENT and DATAREF in event.extensions


def named(event: Envelope) -> Named:
    """Raises DataWrong when it does not say which data."""
    url, said, size = (event.extensions.get(name) for name in (DATAREF, DATAHASH, DATASIZE))
    found = HASH.fullmatch(said) if isinstance(said, str) else None
    if not isinstance(url, str) or found is None:
        raise DataWrong(f"{DATAHASH}: expected sha-256: and 64 digits beside {DATAREF}, found {shown(said)}")
    if type(size) is not int or not 0 < size <= PAYLOAD_STORED_BYTES_MAX:
        raise DataWrong(f"{DATASIZE}: expected 1 to {PAYLOAD_STORED_BYTES_MAX}, found {shown(size)}")
    return Named(url, found[1], size)


def checked(one: Named, data: bytes) -> bytes:
    """`data`, which are those that the event names. Raises DataWrong."""
    if len(data) != one.size:
        more = "more" if len(data) > one.size else f"{len(data)}"
        raise DataWrong(f"data: expected {one.size} bytes, as the event says, found {more}")
    if digest_of(data) != one.sha256:
        raise DataWrong("data: expected those whose hash the event says, found others")
    return data
