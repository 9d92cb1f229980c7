"""Objects in a bucket, against a server that speaks S3: the same promises as files, and errors told by kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.request import Request, urlopen

import obstore
import pytest
from obstore.store import S3Store

from contracts.limits import PAYLOAD_BYTES_MAX
from contracts.objects import ObjectDamaged, ObjectMissing, StoreAway, StoreDenied, digest_of
from orchestrator.client import Client
from orchestrator.objects import buckets
from orchestrator.objects.buckets import BucketStore
from orchestrator.objects.kept import Kept
from orchestrator.objects.large import Large
from tests.engine.conftest import Working, client, hints, working
from tests.engine.test_large import FLOWS, LARGE, until_over

__all__ = ["client", "hints", "working"]

DATA: Final = b"some bytes"
DIGEST: Final = digest_of(DATA)
SIZE: Final = len(DATA)
HOUR: Final = timedelta(hours=1)
SIGNED: Final = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=us/20260101/us-east-1/s3/aws4_request,"
    " SignedHeaders=host, Signature=00"
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its URL. It is made once for all tests here, since it takes two seconds to begin."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if "Running on" in line)
            url = line.split()[-1]
            ask(url, "PUT", "/objects")
            yield url
        finally:
            process.kill()


def ask(url: str, method: str, path: str, body: str | None = None) -> None:
    headers = SIGNED | {"Content-Type": "text/plain"}
    with urlopen(Request(url + path, None if body is None else body.encode(), headers, method=method)):
        pass


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> BucketStore:
    return store_at(server, monkeypatch, request.node.name)


def store_at(url: str, monkeypatch: pytest.MonkeyPatch, prefix: str, bucket: str = "objects") -> BucketStore:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "us")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ours")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return BucketStore(bucket, digest_of(prefix.encode())[:16])


@pytest.fixture
def inside(store: BucketStore) -> S3Store:
    """The bucket, below the prefix of this test."""
    return S3Store("objects", prefix=store.name.rpartition("/")[2])


async def names_in(bucket: S3Store) -> list[str]:
    pages = bucket.list()  # pyright: ignore[reportUnknownMemberType]  # its types name a library that is not there
    return [one["path"] async for page in pages for one in page]


async def test_what_was_put_is_got_and_nothing_else_is_in_the_bucket(
    store: BucketStore, inside: S3Store
) -> None:
    await store.put(DIGEST, DATA)
    await store.put(DIGEST, DATA)

    assert await store.get(DIGEST, size=SIZE) == DATA
    assert await names_in(inside) == [DIGEST]


async def test_what_is_there_and_young_is_not_put_again_and_what_is_older_is_as_new(
    store: BucketStore, inside: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await obstore.put_async(inside, DIGEST, DATA.upper())
    await store.put(DIGEST, DATA)
    kept = bytes(await (await obstore.get_async(inside, DIGEST)).bytes_async())
    monkeypatch.setattr(buckets, "FRESH", timedelta(seconds=-1))
    await store.put(DIGEST, DATA)

    assert kept == DATA.upper()
    assert await store.get(DIGEST, size=SIZE) == DATA


@pytest.mark.parametrize("found", [DATA.upper(), DATA + b"!", b""])
async def test_what_is_not_the_object_is_never_given_out(
    store: BucketStore, inside: S3Store, found: bytes
) -> None:
    await obstore.put_async(inside, DIGEST, found)
    with pytest.raises(ObjectDamaged, match=DIGEST[:12]):
        await store.get(DIGEST, size=SIZE)


async def test_what_is_deleted_is_missing_and_may_be_deleted_again(store: BucketStore) -> None:
    await store.put(DIGEST, DATA)
    later = datetime.now(UTC) + HOUR
    await store.delete(DIGEST, than=later - 2 * HOUR)
    assert await store.get(DIGEST, size=SIZE) == DATA
    await store.delete(DIGEST, than=later)
    await store.delete(DIGEST, than=later)
    with pytest.raises(ObjectMissing, match="missing"):
        await store.get(DIGEST, size=SIZE)


async def test_older_ones_are_listed_in_pages_each_once(store: BucketStore, inside: S3Store) -> None:
    datas = [str(number).encode() for number in range(12)]
    for data in datas:
        await store.put(digest_of(data), data)
    await obstore.put_async(inside, "zz/README", b"not ours")

    found: list[str] = []
    later = datetime.now(UTC) + HOUR
    while page := await store.older(later, after=found[-1] if found else "", limit=5):
        found += page

    assert found == sorted(map(digest_of, datas))
    assert await store.older(datetime.now(UTC) - HOUR, after="", limit=5) == []


async def test_a_store_that_does_not_let_us_says_so(store: BucketStore, server: str) -> None:
    await store.put(DIGEST, DATA)
    ask(server, "POST", "/moto-api/reset-auth", "0")
    try:
        with pytest.raises(StoreDenied, match="403"):
            await store.get(DIGEST, size=SIZE)
        with pytest.raises(StoreDenied, match="403"):
            await store.put(digest_of(b"other"), b"other")
    finally:
        ask(server, "POST", "/moto-api/reset-auth", "inf")


async def test_a_bucket_that_is_none_is_no_missing_object(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(server, monkeypatch, "none", bucket="nobodys")
    with pytest.raises(StoreDenied, match="no such bucket"):
        await store.get(DIGEST, size=SIZE)
    with pytest.raises(StoreDenied, match="no such bucket"):
        await store.put(DIGEST, DATA)


async def test_a_store_that_does_not_answer_is_away(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr(buckets, "RETRIES_MAX", 0)
    store = store_at(f"http://127.0.0.1:{unused_tcp_port}", monkeypatch, "away")
    with pytest.raises(StoreAway, match="error sending request"):
        await store.get(DIGEST, size=SIZE)
    with pytest.raises(StoreAway, match="error sending request"):
        await store.put(DIGEST, DATA)


async def test_a_flow_runs_over_a_bucket_and_is_held_when_the_bucket_lost_an_object(
    store: BucketStore, inside: S3Store, working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Large, "kept", Kept(store))
    done = (await client.start(FLOWS.get("large"), LARGE)).execution_id
    async with working(flows=FLOWS, forgetful=True):
        view = await until_over(client, done)
    lost = (await client.start(FLOWS.get("large-child"), LARGE + "!")).execution_id
    for name in await names_in(inside):
        await obstore.delete_async(inside, name)
    monkeypatch.setattr(Large, "kept", Kept(store))
    async with working(flows=FLOWS):
        held = (await until_over(client, lost)).held

    assert len(view.output) == 4 * (PAYLOAD_BYTES_MAX + 1)
    assert held is not None
    assert held.code == "payload-unavailable"
    assert f"expected it in {store.name}, found it missing" in held.reason
