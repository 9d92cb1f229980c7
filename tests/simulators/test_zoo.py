"""The simulated endpoint: what the relay makes of each behaviour, and that nobody takes more than a share of it."""

from __future__ import annotations

import asyncio
import json
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import pytest

from contracts.envelope import decode_structured
from contracts.signature import Secret
from orchestrator.cli.simulate import line
from orchestrator.simulators import server
from orchestrator.simulators.kinds import KINDS, BehaviourInvalid, parsed, scripted
from orchestrator.simulators.zoo import Zoo, zoo
from relay.delivery import Answer, Try, judge
from relay.endpoints import Endpoint
from relay.outbox import Message
from relay.wire import Wire
from tests.habits.documents import code_in, table
from tests.relay.given import HERE, SECRET, body_of
from tests.waiting import until

LONG: Final = timedelta(seconds=30)  # a deadline that no test comes to
SHORT: Final = timedelta(milliseconds=500)  # a deadline that a test waits for


def command(*, message_id: UUID | None = None, timeout: timedelta = LONG) -> Message:
    message_id = message_id or uuid4()
    return Message(
        tenant_id=1,
        message_id=message_id,
        token=uuid4(),
        attempt=1,
        endpoint="payments",
        content_type="application/cloudevents+json",
        body=body_of(message_id, uuid4()),
        timeout=timeout,
        command=True,
        replies_from="payments",
        at_most_once=False,
    )


def sending() -> Wire:
    """The relay's wire, which speaks to nobody by TLS here: to read the system's authorities takes long."""
    return Wire(HERE, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


async def send(wire: Wire, url: str, message: Message | None = None, *, secret: Secret = SECRET) -> Answer:
    return await wire.send(message or command(), Endpoint(url, (secret,)), now=datetime.now(UTC))


def means(answer: Answer) -> tuple[str, str, str]:
    """What it was, in one word, and what becomes of a command and of an event."""
    message_id = uuid4()
    words = [
        judge(answer, Try(message_id=message_id, attempt=1, endpoint="payments", command=of)).word
        for of in (True, False)
    ]
    return answer.error_code or f"http-{answer.status}", words[0], words[1]


ENDLESS: Final = ("hang", "slow-header", "continue", "drip")
"""Those that only a deadline ends."""
WORDS: Final = {"taken": "delivered", "refused": "refused", "tried": "retry"}
PAGE: Final = "docs/testing.md"


def word(text: str) -> str:
    """The relay's word for what a page says."""
    return next(WORDS[begins] for begins in WORDS if text.startswith(begins))


def test_the_page_tells_every_behaviour() -> None:
    told = [(code_in(row[0])[0], row[1]) for row in table(PAGE, "behaviour")]

    assert told == [(kind.usage(name), kind.does) for name, kind in KINDS.items()]


async def test_the_relay_makes_of_each_behaviour_what_the_page_says() -> None:
    async with zoo(secrets=[SECRET]) as here, sending() as wire:

        async def of(name: str) -> tuple[str, str, str]:
            deadline = SHORT if name in ENDLESS else LONG
            return means(await send(wire, here.at(name), command(timeout=deadline)))

        quick = [name for name in KINDS if name not in ENDLESS]
        found = dict(zip(quick, await asyncio.gather(*map(of, quick)), strict=True))
        await asyncio.gather(*(of("ok") for _ in ENDLESS))  # so that no deadline has to do with connecting
        found |= dict(zip(ENDLESS, await asyncio.gather(*map(of, ENDLESS)), strict=True))

        rows = zip(KINDS, table(PAGE, "behaviour"), strict=True)
        assert found == {name: (code_in(row[2])[0], word(row[3]), word(row[4])) for name, row in rows}
        assert {seen.signature for seen in here.seen} == {"verified"}


async def test_a_status_means_what_the_page_about_delivering_says() -> None:
    rows = [row for row in table("docs/delivering.md", "answer") if row[0].isdigit()]
    async with zoo() as here, sending() as wire:
        for status, of_command, of_event in rows:
            found = means(await send(wire, here.at(f"status/{status}")))

            assert found == (f"http-{status}", word(of_command), word(of_event))


async def test_retry_after_is_told_as_it_is_written() -> None:
    async with zoo() as here, sending() as wire:
        answer = await send(wire, here.at("status/429?retry_after=7"))

        assert (answer.status, answer.retry_after) == (429, timedelta(seconds=7))


async def test_what_is_kept_after_an_answer_is_cut_at_the_next_request() -> None:
    async with zoo() as here, sending() as wire:
        await send(wire, here.at("close-after-answer"))
        answer = await send(wire, here.at("close-after-answer"))

        assert (answer.status, answer.cut_before) == (200, True)
        assert [seen.connection for seen in here.seen] == [1, 1, 2]


async def test_flaky_fails_each_message_so_often() -> None:
    one, two = uuid4(), uuid4()
    async with zoo() as here, sending() as wire:
        url = here.at("flaky?fail=2&status=500")
        found = [
            (await send(wire, url, command(message_id=message))).status
            for message in (one, one, two, one, two, two)
        ]

    assert found == [500, 500, 500, 200, 500, 200]


@pytest.mark.parametrize("end", ["done", "refused", "failed"])
async def test_a_command_gets_its_reply_from_who_has_the_secret(end: str) -> None:
    async with zoo(secrets=[SECRET]) as here, sending() as wire:
        message = command()

        answer = await send(wire, here.at(f"reply?end={end}&code=sold-out"), message)

        assert answer.reply is not None
        event = decode_structured(answer.reply)
        assert (event.type, event.extensions["causationid"]) == (
            f"payment.charge.{end}",
            str(message.message_id),
        )
        assert ("sold-out" in str(event.data)) == (end != "done")


async def test_a_reply_has_the_value_that_it_is_told() -> None:
    script = {"*": ['reply?value={"charge": "a%26b"}']}
    async with zoo(secrets=[SECRET], script=script) as here, sending() as wire:
        answer = await send(wire, here.url)

    assert answer.reply is not None
    assert decode_structured(answer.reply).data == {"charge": "a&b"}


async def test_nobody_else_gets_a_reply() -> None:
    other = Secret.of(b"another secret of 24 bytes and more")
    async with zoo() as trusts_nobody, zoo(secrets=[other]) as here, sending() as wire:
        assert (await send(wire, trusts_nobody.at("reply"))).status == 501
        assert (await send(wire, here.at("reply"))).status == 401

        assert [seen.signature for seen in trusts_nobody.seen + here.seen] == ["unchecked", "mismatch"]


async def test_a_script_says_what_a_path_does_one_after_the_other() -> None:
    script = scripted('{"/hook": ["status/500", "reset", "ok"], "*": ["status/410"]}')
    async with zoo(script=script) as here, sending() as wire:
        for _ in range(4):
            await send(wire, f"{here.url}/hook?a=b")
        gone = await send(wire, f"{here.url}/ok")

        names = [seen.behaviour for seen in here.seen]
        # What is cut on a kept connection is sent once more within the try, and gets the next of them.
        assert names == ["status", "reset", "ok", "ok", "ok", "status"]
        assert gone.status == 410


async def test_a_path_that_is_no_behaviour_is_404_and_says_which_there_are() -> None:
    async with zoo() as here, sending() as wire:
        answer = await send(wire, f"{here.url}/banana")

        assert answer.status == 404
        assert b"expected one of ok, status, flaky" in answer.body
        assert (await here.gets()).behaviour == "unknown"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reply?value={1}", "reply: value: expected strict JSON"),
        ("banana", "expected one of ok, status, .*, found 'banana'"),
        ("", "expected one of ok, .*, found ''"),
        ("status/99", "status: status: expected a status from 200 to 999, found '99'"),
        ("status/503?retry_after=a\x1bb", "expected at most 64 visible characters, found 'a.x1bb'"),
        ("flaky?fail=1001", "flaky: fail: expected 0 to 1000, found '1001'"),
        ("flaky?times=1", "flaky: expected fail, status, found 'times'"),
        ("ok/5", "ok: expected no options, found '/'"),
        ("reply?end=lost", "expected done, refused or failed, found 'lost'"),
        ("flood?" + "&".join(["status=200"] * 9), "flood: expected at most 8 options, found 9"),
    ],
)
def test_a_behaviour_that_nobody_understands_is_named(text: str, expected: str) -> None:
    with pytest.raises(BehaviourInvalid, match=expected):
        parsed(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "script: expected an object such as"),
        ("{", "script: expected strict JSON"),
        ('{"hook": ["ok"]}', "expected a path such as /hook, or .*, found 'hook'"),
        ('{"/hook": "ok"}', "'/hook': expected a list of 1 to 1000 behaviours"),
        ('{"/hook": []}', "'/hook': expected a list of 1 to 1000 behaviours"),
        ('{"/hook": ["banana"]}', "found 'banana'"),
        (" " * (64 * 1024 + 1), "expected at most 65536 bytes, found 65537"),
    ],
)
def test_a_script_that_nobody_understands_is_named(text: str, expected: str) -> None:
    with pytest.raises(BehaviourInvalid, match=expected):
        scripted(text)


# ---- what it can stand -------------------------------------------------------------------------------------------


async def raw(here: Zoo, request: bytes) -> bytes:
    """All that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.server.port)
    try:
        writer.write(request)
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X: " + b"y" * 70_000, 431),
        (b"Transfer-Encoding: chunked", 411),
        (b"Content-Length: ten", 400),
        (b"Content-Length: -1", 400),
        (b"Content-Length: 1048577", 413),
        (b"Content-Length: " + b"9" * 5_000, 413),
    ],
)
async def test_what_is_too_much_or_no_request_is_refused_and_remembered(head: bytes, status: int) -> None:
    async with zoo() as here:
        got = await raw(here, b"POST /ok HTTP/1.1\r\n" + head + b"\r\n\r\n")

        assert got.startswith(f"HTTP/1.1 {status} ".encode())
        assert [seen.behaviour for seen in here.seen] == [f"unreadable: {status}"]


async def test_one_connection_more_than_it_has_room_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    post = b"POST /ok HTTP/1.1\r\nConnection: close\r\n\r\n"
    async with zoo() as here:
        _, first = await asyncio.open_connection("127.0.0.1", here.server.port)
        first.write(b"POST /hang HTTP/1.1\r\n\r\n")
        await here.gets()

        refused = await raw(here, post)
        first.close()

        async def is_over() -> bool:
            return not here.server.open

        await until(is_over, what="the end of the first connection")
        taken = await raw(here, post)

    assert (refused, taken[:12]) == (b"", b"HTTP/1.1 200")


async def test_a_connection_has_an_end_however_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTION_SECONDS_MAX", 0.05)
    async with zoo() as here:
        assert await raw(here, b"POST /hang HTTP/1.1\r\n\r\n") == b""


@pytest.mark.parametrize(("limit", "value"), [("KEPT_MAX", 3), ("KEPT_BYTES_MAX", 10)])
async def test_what_is_remembered_has_a_bound(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(server, limit, value)
    four = b"POST /ok HTTP/1.1\r\nContent-Length: 4\r\nwebhook-id: %d\r\n\r\nabcd"
    empty = b"POST /ok HTTP/1.1\r\nConnection: close\r\nwebhook-id: last\r\n\r\n"
    async with zoo() as here:
        await raw(here, b"".join(four % number for number in range(5)) + empty)

        assert [seen.id for seen in here.seen] == ["3", "4", "last"]
        assert [it.request for it in here.seen] == here.server.requests


async def test_a_line_about_a_request_has_nothing_that_a_terminal_obeys_and_nothing_of_a_body() -> None:
    request = (
        b"P\x1b[2J /ok\x7f\x9b HTTP/1.1\r\nwebhook-id: \x1b]0;evil\x07" + b"i" * 500 + b"\r\n"
        b"Authorization: Bearer hush\r\nConnection: close\r\nContent-Length: 6\r\n\r\nsecret"
    )
    async with zoo(secrets=[SECRET]) as here:
        await raw(here, request)
        said = line(await here.gets())

    assert all(0x20 <= ord(letter) < 0x7F for letter in said)
    told: dict[str, Any] = json.loads(said)
    assert (told["bytes"], told["signature"], len(told["id"])) == (6, "missing", 128)
    assert "hush" not in said
    assert "secret" not in said
