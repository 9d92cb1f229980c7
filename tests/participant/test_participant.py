"""A participant acts once on a command, tells the receiver what came of it, and only then says 202."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.trace import get_current_span
from pydantic import BaseModel

from contracts.envelope import STRUCTURED, Envelope, decode_structured, encode_structured
from contracts.errors import Unavailable
from contracts.messages import Command, Refused
from contracts.signature import Secret, sign, verify
from receiver.memory import LocalMemory, Memory, SqliteMemory
from receiver.participant import Delivery, Failed, Participant
from tests.telemetry.collector import collecting

COMMANDS = Secret.of(b"c" * 32)
REPLIES = Secret.of(b"r" * 32)


class Charged(BaseModel):
    charge: str


class Charge(Command[Charged], endpoint="payments", type="payment.charge"):
    order: str
    amount: int


class Refund(Command[None], endpoint="payments", type="payment.refund"):
    order: str


@dataclass
class FakeReceiver:
    """Takes replies, or answers `status` as long as it is set, and verifies each one's signature."""

    taken: list[bytes] = field(default_factory=list[bytes])
    status: int = 202
    took: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        verify(
            [REPLIES],
            message_id=request.headers["webhook-id"],
            timestamp=request.headers["webhook-timestamp"],
            signature=request.headers["webhook-signature"],
            body=body,
            now=int(time.time()),
        )
        assert request.path == "/events/default/payments"
        assert request.headers["webhook-id"] == decode_structured(body).id
        if self.status == 202:
            self.taken.append(body)
            self.took.set()
        return web.Response(status=self.status)

    @property
    def replies(self) -> list[Envelope]:
        return [decode_structured(body) for body in self.taken]


@dataclass
class Service:
    participant: Participant
    receiver: FakeReceiver
    url: str
    session: aiohttp.ClientSession
    receiver_url: str

    async def post(
        self,
        command: Command[Any] | None = None,
        *,
        message: str = "m1",
        key: str | None = None,
        body: bytes | None = None,
        secret: Secret = COMMANDS,
        source: str = "/waypost/executions/e",
        content_type: str = STRUCTURED,
        webhook_id: str | None = None,
        attempt: str = "1",
        **extensions: str | bool,
    ) -> int:
        if body is None:
            assert command is not None
            name = key or ("e/0/charge/undo" if isinstance(command, Refund) else "e/0/charge")
            body = encode_structured(
                Envelope(
                    id=message,
                    source=source,
                    type=command.type_,
                    subject="order-1",
                    time="2026-11-30T10:15:00Z",
                    datacontenttype="application/json",
                    data=command.model_dump(mode="json"),
                    extensions={"correlationid": "e", "idempotencykey": name, **extensions},
                )
            )
        now = int(time.time())
        headers = {
            "content-type": content_type,
            "webhook-id": webhook_id or message,
            "webhook-timestamp": str(now),
            "waypost-attempt": attempt,
            "webhook-signature": sign([secret], message_id=webhook_id or message, timestamp=now, body=body),
        }
        async with self.session.post(self.url, data=io.BytesIO(body), headers=headers) as answer:
            return answer.status


@asynccontextmanager
async def served(app: web.Application) -> AsyncGenerator[str]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


@asynccontextmanager
async def service(
    handle: Callable[..., Any],
    *more: Callable[..., Any],
    memory: Memory | None = None,
    data: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None,
) -> AsyncGenerator[Service]:
    receiver = FakeReceiver()
    inbox = web.Application()
    if data is not None:
        inbox.router.add_get("/data/{any:.*}", data)
    inbox.router.add_post("/{any:.*}", receiver.take)
    async with served(inbox) as receiver_url, aiohttp.ClientSession() as session:
        payments = Participant(
            name="payments",
            receiver_url=receiver_url,
            secret=REPLIES,
            accepts={"/waypost": COMMANDS},
            memory=memory or LocalMemory(),
        )
        payments.does(Charge)(handle)
        for undo in more:
            payments.does(Refund)(undo)
        async with served(payments.app()) as url:
            yield Service(payments, receiver, url + "/waypost", session, receiver_url)


def said(reply: Envelope) -> dict[str, Any]:
    assert isinstance(reply.data, dict)
    return cast("dict[str, Any]", reply.data)


CHARGE = Charge(order="order-1", amount=42)
REFUND = Refund(order="order-1")


def charged(command: Charge) -> Charged:
    return Charged(charge=f"ch-{command.order}")


async def test_a_command_is_answered_202_after_its_reply_was_taken() -> None:
    async with service(charged) as it:
        status = await it.post(CHARGE)

        [reply] = it.receiver.replies
    assert status == 202
    assert (reply.type, reply.source, reply.subject) == ("payment.charge.done", "/payments", "order-1")
    assert reply.data == {"charge": "ch-order-1"}
    assert (reply.extensions["causationid"], reply.extensions["correlationid"]) == ("m1", "e")


COMMAND_SPAN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_reply_says_the_span_of_its_command_where_no_collector_is_named() -> None:
    async with service(charged) as it:
        await it.post(CHARGE, traceparent=COMMAND_SPAN)

        [reply] = it.receiver.replies
    assert reply.extensions["traceparent"] == COMMAND_SPAN


async def test_a_run_is_a_span_under_its_command_and_its_reply_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def charge(command: Charge, delivery: Delivery) -> Charged:
        seen.append(str(delivery.event.extensions.get("traceparent")))
        seen.append(f"{get_current_span().get_span_context().span_id:016x}")
        return charged(command)

    with collecting() as collector:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", collector.environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
        )
        async with service(charge) as it:
            await it.post(CHARGE, traceparent=COMMAND_SPAN)
            await it.post(CHARGE, message="m2", key="e/0/other")  # in no trace, so no span

            [reply, _] = it.receiver.replies
        [run] = collector.spans

    assert reply.extensions["traceparent"] == seen[0] == f"00-{run.trace_id}-{run.span_id}-01"
    assert seen[1] == run.span_id
    assert (run.trace_id, run.parent_id) == (COMMAND_SPAN[3:35], COMMAND_SPAN[36:52])
    assert (run.service, run.name, run.kind, run.is_error) == (
        "payments", "process payment.charge", "consumer", False,
    )  # fmt: skip
    assert run.attributes["http.response.status_code"] == 202


async def test_a_run_that_raised_is_an_error_and_the_next_one_another_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = [RuntimeError("no")]

    def charge(command: Charge) -> Charged:
        if left:
            raise left.pop()
        return charged(command)

    with collecting() as collector:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", collector.environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
        )
        async with service(charge) as it:
            await it.post(CHARGE, traceparent=COMMAND_SPAN)
            await it.post(CHARGE, traceparent=COMMAND_SPAN, attempt="2")
        runs = collector.spans

    assert [(run.is_error, run.attributes["http.response.status_code"]) for run in runs] == [
        (True, 500),
        (False, 202),
    ]
    assert len({run.span_id for run in runs}) == 2


async def test_a_collector_that_takes_nothing_does_not_keep_a_service_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("receiver.otlp.FLUSH_SECONDS", 0.05)
    with collecting() as collector:
        collector.hang.set()
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", collector.environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
        )
        async with service(charged) as it:
            assert await it.post(CHARGE, traceparent=COMMAND_SPAN) == 202
        assert collector.spans == []


async def test_a_command_that_comes_again_acts_once_and_gets_the_same_bytes() -> None:
    acted: list[Charge] = []

    async def charge(command: Charge) -> Charged:
        acted.append(command)
        return charged(command)

    async with service(charge) as it:
        statuses = [await it.post(CHARGE), await it.post(CHARGE)]

        first, second = it.receiver.taken
    assert statuses == [202, 202]
    assert first == second
    assert acted == [CHARGE]


async def test_a_reply_that_was_not_taken_is_503_and_is_sent_when_the_command_comes_again() -> None:
    acted: list[Charge] = []

    def charge(command: Charge) -> Charged:
        acted.append(command)
        return charged(command)

    async with service(charge) as it:
        it.receiver.status = 500
        before = await it.post(CHARGE)
        it.receiver.status = 202
        after = await it.post(CHARGE)

        [reply] = it.receiver.replies
    assert (before, after) == (503, 202)
    assert reply.type == "payment.charge.done"
    assert len(acted) == 1


async def test_a_command_is_503_while_its_first_run_goes_on() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def charge(command: Charge) -> Charged:
        begun.set()
        await go_on.wait()
        return charged(command)

    async with service(charge) as it:
        first = asyncio.create_task(it.post(CHARGE))
        await begun.wait()
        second = await it.post(CHARGE)
        go_on.set()

        assert (await first, second) == (202, 503)


async def test_a_run_goes_on_when_its_caller_hangs_up() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def charge(command: Charge) -> Charged:
        begun.set()
        await go_on.wait()
        return charged(command)

    async with service(charge) as it:
        caller = asyncio.create_task(it.post(CHARGE))
        await begun.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        go_on.set()
        await it.receiver.took.wait()

        assert it.receiver.replies[0].type == "payment.charge.done"


async def test_a_handler_that_is_not_async_runs_in_a_thread() -> None:
    loop_thread = threading.get_ident()

    def charge(_: Charge) -> Charged:
        return Charged(charge=str(threading.get_ident() != loop_thread))

    async with service(charge) as it:
        await it.post(CHARGE)

        assert it.receiver.replies[0].data == {"charge": "True"}


async def test_a_handler_may_ask_for_its_delivery() -> None:
    def charge(_: Charge, delivery: Delivery) -> Charged:
        return Charged(charge=f"{delivery.message} {delivery.key} {delivery.again}")

    async with service(charge) as it:
        await it.post(CHARGE)

        assert it.receiver.replies[0].data == {"charge": "m1 e/0/charge False"}


async def test_a_refusal_is_a_reply_and_is_remembered_for_its_message() -> None:
    acted: list[Charge] = []

    def charge(command: Charge) -> Charged:
        acted.append(command)
        raise Refused("declined", "no money", detail={"missing": 3})

    async with service(charge) as it:
        statuses = [await it.post(CHARGE), await it.post(CHARGE)]

        first, second = it.receiver.taken
    reply = decode_structured(first)
    assert statuses == [202, 202]
    assert first == second
    assert len(acted) == 1
    assert reply.type == "payment.charge.refused"
    assert reply.data == {"code": "declined", "message": "no money", "detail": {"missing": 3}}


async def test_giving_up_is_a_failed_reply() -> None:
    def charge(_: Charge) -> Charged:
        raise Failed("lost", "the bank never answered")

    async with service(charge) as it:
        await it.post(CHARGE)

        [reply] = it.receiver.replies
    assert (reply.type, said(reply)["code"]) == ("payment.charge.failed", "lost")


async def test_any_other_exception_is_500_and_the_command_acts_when_it_comes_again() -> None:
    seen: list[bool] = []

    def charge(command: Charge, delivery: Delivery) -> Charged:
        seen.append(delivery.again)
        if len(seen) == 1:
            raise RuntimeError("boom")
        return charged(command)

    async with service(charge) as it:
        statuses = [await it.post(CHARGE), await it.post(CHARGE)]

        [reply] = it.receiver.replies
    assert statuses == [500, 202]
    assert seen == [False, True]
    assert reply.type == "payment.charge.done"


async def test_a_handler_that_is_not_available_is_503_and_leaves_no_suspicion() -> None:
    seen: list[bool] = []

    def charge(command: Charge, delivery: Delivery) -> Charged:
        seen.append(delivery.again)
        if len(seen) == 1:
            raise Unavailable("the bank")
        return charged(command)

    async with service(charge) as it:
        statuses = [await it.post(CHARGE), await it.post(CHARGE)]

    assert statuses == [503, 202]
    assert seen == [False, False]


async def test_a_result_that_no_reply_can_carry_was_done_but_cannot_be_told() -> None:
    def charge(_: Charge) -> Charged:
        return Charged(charge="x" * (1 << 20))

    async with service(charge) as it:
        status = await it.post(CHARGE)

        [reply] = it.receiver.replies
    assert status == 202
    assert (reply.type, said(reply)["code"]) == ("payment.charge.failed", "too-large")


async def test_a_result_of_another_type_is_told_as_failed() -> None:
    def charge(_: Charge) -> Any:
        return "paid"

    async with service(charge) as it:
        await it.post(CHARGE)

        [reply] = it.receiver.replies
    assert (reply.type, said(reply)["code"]) == ("payment.charge.failed", "reply-invalid")


async def test_data_that_does_not_fit_is_refused_and_not_echoed() -> None:
    class Odd(Command[None], endpoint="payments", type="payment.charge"):
        order: str
        amount: str

    async with service(charged) as it:
        status = await it.post(Odd(order="o", amount="\x1b[31mred"))

        [reply] = it.receiver.replies
    assert status == 202
    assert (reply.type, said(reply)["code"]) == ("payment.charge.refused", "invalid")
    assert "amount" in said(reply)["message"]
    assert "red" not in json.dumps(said(reply))


async def test_a_command_after_its_expiry_is_not_begun() -> None:
    acted: list[Charge] = []

    def charge(command: Charge) -> Charged:
        acted.append(command)
        return charged(command)

    async with service(charge) as it:
        status = await it.post(CHARGE, expirytime="2026-01-01T00:00:00Z")

        [reply] = it.receiver.replies
    assert (status, acted) == (202, [])
    assert (reply.type, said(reply)["code"]) == ("payment.charge.refused", "expired")


async def test_an_expired_command_that_may_have_acted_is_failed_and_not_refused() -> None:
    def charge(_: Charge) -> Charged:
        raise RuntimeError("boom")

    async with service(charge) as it:
        await it.post(CHARGE)
        await it.post(CHARGE, expirytime="2026-01-01T00:00:00Z")

        [reply] = it.receiver.replies
    assert (reply.type, said(reply)["code"]) == ("payment.charge.failed", "expired")


async def test_an_undo_of_what_was_done_runs() -> None:
    undone: list[Refund] = []

    async with service(charged, undone.append) as it:
        await it.post(CHARGE)
        status = await it.post(REFUND, message="u1", undoes="m1", known=True)

        _, reply = it.receiver.replies
    assert (status, undone) == (202, [REFUND])
    assert (reply.type, reply.extensions["causationid"]) == ("payment.refund.done", "u1")


async def test_an_undo_of_something_never_done_is_done_and_its_original_is_refused() -> None:
    acted: list[object] = []

    def charge(command: Charge) -> Charged:
        acted.append(command)
        return charged(command)

    async with service(charge, acted.append) as it:
        statuses = [
            await it.post(REFUND, message="u1", undoes="m1", known=False),
            await it.post(CHARGE, message="m1"),
        ]

        undo, original = it.receiver.replies
    assert (statuses, acted) == ([202, 202], [])
    assert undo.type == "payment.refund.done"
    assert (original.type, said(original)["code"]) == ("payment.charge.refused", "undone")


async def test_the_next_try_of_a_refused_undo_runs() -> None:
    tries: list[Refund] = []

    def refund(command: Refund) -> None:
        tries.append(command)
        if len(tries) == 1:
            raise Refused("closed")

    async with service(charged, refund) as it:
        await it.post(CHARGE)
        await it.post(REFUND, message="u1", undoes="m1")
        await it.post(REFUND, message="u1", undoes="m1")
        await it.post(REFUND, message="u2", undoes="m1")

        types = [reply.type.rsplit(".")[-1] for reply in it.receiver.replies]
    assert types == ["done", "refused", "refused", "done"]
    assert len(tries) == 2


async def test_another_message_of_a_done_action_gets_its_outcome_in_a_reply_of_its_own() -> None:
    async with service(charged) as it:
        await it.post(CHARGE, message="m1")
        await it.post(CHARGE, message="m2")

        first, second = it.receiver.replies
    assert (first.data, second.data) == ({"charge": "ch-order-1"},) * 2
    assert (first.extensions["causationid"], second.extensions["causationid"]) == ("m1", "m2")
    assert first.id != second.id


async def test_memory_that_cannot_be_asked_begins_nothing() -> None:
    acted: list[Charge] = []
    memory = LocalMemory()

    async with service(acted.append, memory=memory) as it:
        memory.close()
        status = await it.post(CHARGE)

    assert (status, acted) == (503, [])


async def test_what_a_process_did_is_known_to_the_next(tmp_path: Path) -> None:
    acted: list[Charge] = []

    def charge(command: Charge) -> Charged:
        acted.append(command)
        return charged(command)

    async with service(charge, memory=SqliteMemory(tmp_path / "payments.sqlite")) as it:
        await it.post(CHARGE)
        [before] = it.receiver.taken
    async with service(charge, memory=SqliteMemory(tmp_path / "payments.sqlite")) as it:
        await it.post(CHARGE)
        [after] = it.receiver.taken

    assert before == after
    assert len(acted) == 1


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (401, {"secret": REPLIES}),
        (403, {"source": "/waypostern/executions/e"}),
        (415, {"content_type": "application/json"}),
        (400, {"body": b'{"specversion": "1.0"}'}),
        (400, {"body": b"\xff"}),
        (400, {"webhook_id": "m2"}),
        (400, {"expirytime": "tomorrow"}),
        (413, {"body": b"x" * ((1 << 20) + 1)}),
        (501, {"command": REFUND}),
    ],
)
async def test_a_request_that_is_no_command_of_ours_begins_nothing(status: int, told: dict[str, Any]) -> None:
    acted: list[Charge] = []

    async with service(acted.append) as it:
        asked: dict[str, Any] = {"command": CHARGE, **told}
        found = await it.post(**asked)

        replies = it.receiver.taken
    assert (found, acted, replies) == (status, [], [])


async def test_a_second_handler_of_one_type_is_an_error() -> None:
    async with service(charged) as it:
        with pytest.raises(TypeError, match="found a second"):
            it.participant.does(Charge)


# Replies in the answer


async def answer_to(url: str, body: bytes) -> tuple[int, str, bytes]:
    """Status, content type and body of the answer to a signed command."""
    now, message = int(time.time()), decode_structured(body).id
    headers = {
        "content-type": STRUCTURED,
        "webhook-id": message,
        "webhook-timestamp": str(now),
        "webhook-signature": sign([COMMANDS], message_id=message, timestamp=now, body=body),
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=io.BytesIO(body), headers=headers) as answer,
    ):
        return answer.status, answer.headers["content-type"], await answer.read()


async def test_a_reply_can_be_the_answer_and_is_the_same_bytes_each_time() -> None:
    acted: list[Charge] = []

    def charge(command: Charge) -> Charged:
        acted.append(command)
        return charged(command)

    payments = Participant(
        name="payments", accepts={"/waypost": COMMANDS}, memory=LocalMemory(), reply_in_answer=True
    )
    payments.does(Charge)(charge)
    command = encode_structured(
        Envelope(
            id="m1",
            source="/waypost/executions/e",
            type="payment.charge",
            data=CHARGE.model_dump(mode="json"),
            extensions={"idempotencykey": "e/0/charge"},
        )
    )
    async with served(payments.app()) as url:
        first = await answer_to(f"{url}/waypost", command)
        second = await answer_to(f"{url}/waypost", command)

    reply = decode_structured(first[2])
    assert first[:2] == (200, STRUCTURED)
    assert (reply.type, reply.extensions["causationid"]) == ("payment.charge.done", "m1")
    assert reply.data == {"charge": "ch-order-1"}
    assert second == first
    assert acted == [CHARGE]


def test_a_participant_that_could_not_reply_is_not_made() -> None:
    with pytest.raises(TypeError, match="expected receiver_url= and secret=, or reply_in_answer=True"):
        Participant(name="payments", accepts={"/waypost": COMMANDS}, memory=LocalMemory())


def test_a_port_that_is_taken_ends_the_service_with_what_to_do() -> None:
    payments = Participant(
        name="payments", accepts={"/waypost": COMMANDS}, memory=LocalMemory(), reply_in_answer=True
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            payments.run(port=port)

    assert str(ended.value) == (
        f"payments: run(host=, port=): expected an address to listen on, found 127.0.0.1:{port}, where something"
        " listens already; stop that, or name another port, or 0 for any free one"
    )
