"""Secrets that are kept elsewhere: a reference names one, and whoever knows its kind fetches it.

    env:BILLING_SECRET            a variable of the relay's environment
    file:/run/secrets/billing     a file that the relay may read
    vault:billing/webhook         anything else: a `Manager` that the relay was given for its kind

What is fetched is the secret as text, `whsec_…` or `whsk_…`.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from contracts.errors import BadSecret, shown
from contracts.signature import Signer, signer

FETCH_SECONDS_MAX: Final = 5.0  # for a manager to answer
SECRET_FILE_BYTES_MAX: Final = 4096  # of a file that holds a secret


class Manager(Protocol):
    """Somebody who keeps secrets. `fetch` gets what stands behind the colon; whatever it raises means: not now."""

    async def fetch(self, name: str) -> str: ...


class Environment:
    """The relay's own environment."""

    async def fetch(self, name: str) -> str:
        return os.environ[name]


class Files:
    """Files by their whole path."""

    async def fetch(self, name: str) -> str:
        path = Path(name)
        if not path.is_absolute():
            raise BadSecret("secret: expected the whole path of a file")
        return await asyncio.to_thread(head_of, path)


def head_of(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(SECRET_FILE_BYTES_MAX).decode("ascii")


KNOWN: Final[Mapping[str, Manager]] = {"env": Environment(), "file": Files()}


async def resolve(reference: str, managers: Mapping[str, Manager]) -> Signer:
    """The secret that `reference` names. Raises BadSecret, which names the reference and not the secret."""
    kind, colon, name = reference.partition(":")
    manager = managers.get(kind)
    if not (manager and colon and name):
        raise BadSecret(
            f"secret {shown(reference)}: expected one of {', '.join(sorted(managers))}, a colon and a name"
        )
    try:
        async with asyncio.timeout(FETCH_SECONDS_MAX):
            return signer(await manager.fetch(name))
    except Exception as error:  # noqa: BLE001  # a manager may raise anything, and its words may hold the secret
        raise BadSecret(f"secret {shown(reference)}: {type(error).__name__}") from None
