"""Objects in a bucket of S3, or of anything that speaks its protocol: `PREFIX/DIGEST`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from contracts.errors import shown
from contracts.objects import DIGEST, JSON_TYPE, ObjectDamaged, ObjectMissing, StoreAway, StoreDenied, check

CONNECT_SECONDS: Final = 5.0
"""For a connection."""
REQUEST_SECONDS: Final = 30.0
"""For one request, its body included; then the store counts as away."""
RETRIES_MAX: Final = 2
"""Of one request, before the store counts as away."""
FRESH: Final = timedelta(hours=1)
"""What is there and younger than this is not put again. A sweep leaves what is younger than much more."""
PAGE_MAX: Final = 1_000
"""Objects of one listing."""


class BucketStore:
    """In `bucket` below `prefix`. Credentials, region and endpoint are what the environment says: AWS_ACCESS_KEY_ID and
    its like, a web identity, the machine's role.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.name = f"s3://{bucket}/{prefix}"
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            retry_config={
                "max_retries": RETRIES_MAX,
                "retry_timeout": timedelta(seconds=REQUEST_SECONDS),
            },
        )

    def __repr__(self) -> str:
        return f"BucketStore({self.name})"

    async def put(self, digest: str, data: bytes) -> None:
        async with self._told(digest):
            if not await self._is_fresh(digest, len(data)):
                await obstore.put_async(
                    self._store,
                    key(digest),
                    data,
                    use_multipart=False,
                    attributes={"Content-Type": JSON_TYPE},
                )

    async def _is_fresh(self, digest: str, size: int) -> bool:
        try:
            found = await obstore.head_async(self._store, key(digest))
        except FileNotFoundError:
            return False
        return found["size"] == size and datetime.now(UTC) - found["last_modified"] < FRESH

    async def get(self, digest: str, *, size: int) -> bytes:
        async with self._told(digest):
            found = await obstore.get_async(self._store, key(digest))
            if found.meta["size"] != size:
                raise ObjectDamaged(digest, self.name, f"{found.meta['size']} bytes instead of {size}")
            data = bytes(await found.bytes_async())
        return check(digest, size, data, self.name)

    async def delete(self, digest: str, *, than: datetime) -> None:
        """It looks first, since a bucket does not compare ages itself: what is put again between the two is lost."""
        with suppress(ObjectMissing):
            async with self._told(digest):
                found = await obstore.head_async(self._store, key(digest))
                if found["last_modified"] < than:
                    await obstore.delete_async(self._store, key(digest))

    async def older(self, than: datetime, *, after: str, limit: int) -> list[str]:
        found: list[str] = []
        async with self._told(""):
            pages = self._store.list(  # pyright: ignore[reportUnknownMemberType]  # its types name a library that is not there
                offset=after or None, chunk_size=PAGE_MAX
            )
            async for page in pages:
                found += [
                    one["path"]
                    for one in page
                    if DIGEST.fullmatch(one["path"]) and one["last_modified"] < than
                ]
                if len(found) >= limit:
                    break
        return found[:limit]

    @asynccontextmanager
    async def _told(self, digest: str) -> AsyncGenerator[None]:
        """Errors of the library as ours."""
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StoreDenied(self.name, "no such bucket") from None
            raise ObjectMissing(digest, self.name) from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StoreDenied(self.name, why(error)) from None
        except (BaseError, OSError, ValueError) as error:
            raise StoreAway(self.name, why(error)) from None


def key(digest: str) -> str:
    assert DIGEST.fullmatch(digest), "a digest is 64 digits, and no path"
    return digest


def why(error: Exception) -> str:
    """What it says at the end of its first line, where the library puts the cause."""
    return shown(str(error).partition("\n")[0].rpartition(" - ")[2].partition(": <")[0]).strip("'\"")
