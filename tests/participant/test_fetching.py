"""The helper gets the data that a command names before it calls a handler: from where it may, and no others."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import pytest
from aiohttp import web

from contracts.dataref import DataAway, DataWrong, naming
from contracts.envelope import ABSENT, Envelope, encode_structured
from contracts.messages import Command
from contracts.objects import digest_of
from contracts.sensitive import Sensitive
from receiver import fetching
from receiver.fetching import Fetcher, origin_of
from receiver.handlers import Delivery, Handler
from tests.participant.test_participant import CHARGE, Charge, Charged, Service, said, served, service

DATA: Final = b'{"order": "order-1", "amount": 42}'
HASH: Final = digest_of(DATA)
OVER: Final = web.AppKey("over", asyncio.Event)


def command(url: str, *, sha256: str = HASH, size: int = len(DATA), **more: Any) -> Envelope:
    event = Envelope(
        id="m1",
        source="/waypost/executions/e",
        type="payment.charge",
        subject="order-1",
        datacontenttype="application/json",
        extensions={"correlationid": "e", "idempotencykey": "e/0/charge", **more},
    )
    return naming(event, url, sha256=sha256, size=size)


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Source:
    """Gives data out as a test says; `asked` are the paths that were."""

    answer: Answer
    url: str = ""
    asked: list[str] = field(default_factory=list[str])

    async def give(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.raw_path)
        return await self.answer(request)


@asynccontextmanager
async def source(answer: Answer) -> AsyncGenerator[Source]:
    one, app = Source(answer), web.Application()
    app.router.add_route("*", "/{any:.*}", one.give)
    app[OVER] = asyncio.Event()
    async with served(app) as url:
        one.url = url
        yield one
        app[OVER].set()


async def plainly(_: web.Request) -> web.StreamResponse:
    return web.Response(body=DATA, content_type="application/json")


def gives(status: int = 200, body: bytes = DATA, **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=headers)

    return answer


async def zipped(_: web.Request) -> web.StreamResponse:
    return web.Response(body=gzip.compress(DATA), headers={"content-encoding": "gzip"})


async def endlessly(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(DATA * 1000)


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-length": str(len(DATA))})
    await response.prepare(request)
    await response.write(DATA[:5])
    assert request.transport is not None
    request.transport.abort()
    return response


async def silently(request: web.Request) -> web.StreamResponse:
    await request.app[OVER].wait()
    return web.Response()


async def test_a_command_has_the_data_that_it_names() -> None:
    async with source(plainly) as one, Fetcher([one.url]) as fetcher:
        event = await fetcher.whole(command(f"{one.url}/data/t?a=%2F"))

    assert event.data == {"order": "order-1", "amount": 42}
    assert one.asked == ["/data/t?a=%2F"]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (gives(404), "data-status"),
        (gives(503), "data-status"),
        (gives(206), "data-status"),
        (gives(302, location="http://127.0.0.1:1/"), "data-status"),
        (zipped, "data-encoded"),
        (cut, "data-connection"),
        (silently, "data-timeout"),
    ],
)
async def test_data_that_cannot_be_got_may_be_later(
    answer: Answer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "DATA_FETCH_SECONDS", 8 if fault != "data-timeout" else 0.1)
    async with source(answer) as one, Fetcher([one.url]) as fetcher:
        with pytest.raises(DataAway) as away:
            await fetcher.whole(command(f"{one.url}/data/t"))

    assert away.value.fault == fault
    assert len(one.asked) == 1


async def test_where_nobody_listens_data_may_be_had_later(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with Fetcher([url]) as fetcher:
        with pytest.raises(DataAway) as away:
            await fetcher.whole(command(f"{url}/data/t"))

    assert away.value.fault == "data-connection"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (gives(body=DATA.upper()), "others"),
        (gives(body=DATA[:-1]), "found 33"),
        (gives(body=DATA + b"!"), "found more"),
        (gives(body=b""), "found 0"),
        (endlessly, "found more"),
    ],
)
async def test_data_that_are_others_are_never_right(answer: Answer, why: str) -> None:
    async with source(answer) as one, Fetcher([one.url]) as fetcher:
        with pytest.raises(DataWrong, match=why):
            await fetcher.whole(command(f"{one.url}/data/t"))


async def test_data_that_are_no_strict_json_are_refused_where_json_is_said() -> None:
    bad = b'{"order": 1, "order": 2}'
    async with source(gives(body=bad)) as one, Fetcher([one.url]) as fetcher:
        with pytest.raises(DataWrong, match="order"):
            await fetcher.whole(command(f"{one.url}/data/t", sha256=digest_of(bad), size=len(bad)))


@pytest.mark.parametrize(
    "other",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:1/data",
        "https://{at}/data",
        "http://user@{at}/data",
        "http://{at}@127.0.0.2/data",
        "http://{at}\\@127.0.0.2/data",
        "http://localhost/data",
        "http://[::1/data",
        "//{at}/data",
        "/data/t",
        "file:///etc/passwd",
        "http://{at}:x/data",
    ],
)
async def test_a_url_elsewhere_is_not_asked(other: str) -> None:
    async with source(plainly) as one, Fetcher([one.url]) as fetcher:
        with pytest.raises(DataAway) as away:
            await fetcher.whole(command(other.replace("{at}", one.url.removeprefix("http://"))))

    assert away.value.fault == "data-origin"
    assert one.asked == []


@pytest.mark.parametrize("networks", [(), ("10.0.0.0/8",)])
async def test_a_name_that_leads_to_a_private_address_is_not_dialled_unless_a_setting_says_so(
    networks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "LOCAL", ())  # localhost as any other name
    async with source(plainly) as one:
        url = one.url.replace("127.0.0.1", "localhost")
        async with Fetcher([url], networks) as fetcher:
            with pytest.raises(DataAway) as away:
                await fetcher.whole(command(f"{url}/data/t"))
        async with Fetcher([url], ["127.0.0.0/8"]) as fetcher:
            assert (await fetcher.whole(command(f"{url}/data/t"))).data is not ABSENT

    assert away.value.fault == "data-address-closed"
    assert one.asked == ["/data/t"]


@pytest.mark.parametrize(
    "text", ["waypost.example", "ftp://a.test", "https://a.test/p", "https://u@a.test", ""]
)
def test_what_is_no_origin_is_refused_when_it_is_set(text: str) -> None:
    with pytest.raises(ValueError, match="data_from"):
        Fetcher([text])


def test_an_origin_has_its_port_whether_it_says_so_or_not() -> None:
    assert origin_of("https://A.test/x") == origin_of("https://a.test:443") == ("https", "a.test", 443)


# ---- the whole participant -------------------------------------------------------------------------------------


@asynccontextmanager
async def bank(answer: Answer, calls: list[Charge]) -> AsyncGenerator[tuple[Service, Source]]:
    """Its receiver gives data out too."""

    def charge(it: Charge) -> Charged:
        calls.append(it)
        return Charged(charge="c1")

    one = Source(answer)
    async with service(charge, data=one.give) as it:
        one.url = it.receiver_url
        yield it, one


async def test_a_handler_gets_what_was_fetched_and_a_repetition_fetches_nothing() -> None:
    calls: list[Charge] = []
    async with bank(plainly, calls) as (it, one):
        body = encode_structured(command(f"{one.url}/data/t"))
        first = await it.post(body=body)
        second = await it.post(body=body, attempt="2")

    assert (first, second) == (202, 202)
    assert calls == [CHARGE]
    assert one.asked == ["/data/t"]
    assert [reply.type for reply in it.receiver.replies] == ["payment.charge.done"] * 2


async def test_data_that_are_others_are_a_refusal_and_no_handler_runs() -> None:
    calls: list[Charge] = []
    async with bank(gives(body=DATA.upper()), calls) as (it, one):
        status = await it.post(body=encode_structured(command(f"{one.url}/data/t")))
        [reply] = it.receiver.replies

    assert (status, reply.type, said(reply)["code"]) == (202, "payment.charge.refused", "data-mismatch")
    assert calls == []


async def test_data_that_cannot_be_got_leave_the_command_as_if_it_had_not_come() -> None:
    calls: list[Charge] = []
    answers = [gives(503), plainly]

    async def then_well(request: web.Request) -> web.StreamResponse:
        return await answers.pop(0)(request)

    async with bank(then_well, calls) as (it, one):
        body = encode_structured(command(f"{one.url}/data/t"))
        first = await it.post(body=body)
        second = await it.post(body=body, attempt="2")

    assert (first, second) == (503, 202)
    assert calls == [CHARGE]
    [reply] = it.receiver.replies
    assert reply.type == "payment.charge.done"


async def test_a_command_whose_time_is_over_fetches_nothing() -> None:
    calls: list[Charge] = []
    async with bank(plainly, calls) as (it, one):
        late = command(f"{one.url}/data/t", expirytime="2026-01-01T00:00:00Z")
        await it.post(body=encode_structured(late))
        [reply] = it.receiver.replies

    assert said(reply)["code"] == "expired"
    assert one.asked == []


class Secretly(Command[None], endpoint="payments", type="payment.charge"):
    card: Annotated[str, Sensitive]


def test_what_a_handler_raised_about_data_from_elsewhere_is_hidden_whole_where_any_is_sensitive() -> None:
    event = command("https://waypost.example/data/t")
    delivery = Delivery.of(event, {"webhook-id": event.id})
    error = RuntimeError("no card 4242")

    assert Handler.of(Secretly, print).told(error, delivery) == "[redacted]"
    assert Handler.of(Charge, print).told(error, delivery) is error
