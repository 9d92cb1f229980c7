"""The effect ledger: inventory, payments and shipping, which the tests never kill. One process, or one for each:
it is those services whose secrets it is given, and all of them write into one book.

    LEDGER_SECRETS='{"payments": {"commands": "whsec_…", "replies": "whsec_…"}, …}' \\
        python ledger.py --book FILE --gate FILE [--seed N] [--trouble P] [--ponder SECONDS]

It shares no code with Waypost, so that a mistake of ours cannot stand on both sides: the standard library, and
the public `standardwebhooks` package to verify commands and to sign replies. Each arrival is on the disk before
anything follows from it. Then the ledger acts, once for each idempotency key, answers 202, and posts its reply
by itself, the same bytes again and again until the receiver takes it.

How it behaves depends on the first word of the order's name: see FIRST_CHARGE, ALWAYS, REFUSALS, IN_THE_ANSWER and
GATED; `late` charges are replied to when their undo has come, and of `twice` each reply is posted again. With
`--trouble` it also fails some first and second arrivals of every message, before or after it acted, as `--seed`
draws. What it wrote down is read by `book.py`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from standardwebhooks import Webhook, WebhookVerificationError

Json = Any
Event = dict[str, Json]
Answer = int | bytes | Literal["cut", "silence"]
"""A status, the reply, the end of the connection, or nothing until the caller has enough."""

CLOUDEVENT: Final = "application/cloudevents+json"
THINKING_SECONDS_MAX: Final = 0.1  # before an answer
POST_SECONDS_MAX: Final = 5.0  # for the receiver to answer
PAUSE_SECONDS: Final = (0.05, 0.1, 0.2, 0.4)  # before a reply is posted again; the last one from then on
GATE_SECONDS: Final = 0.02  # between two looks at the gate


@dataclass(frozen=True, slots=True)
class Mood:
    """How one arrival is treated: refused with `before` and not acted on, or acted on and then answered `after`.

    `forgets`: no reply is posted for this arrival; only when the command comes again.
    """

    before: int | None = None
    after: int | Literal["cut", "silence"] = 202
    forgets: bool = False


FIRST_CHARGE: Final = {
    "busy": Mood(before=503),
    "throttled": Mood(before=429),
    "broken": Mood(after=500, forgets=True),
    "cut": Mood(after="cut", forgets=True),
    "silent": Mood(after="silence", forgets=True),
    "confused": Mood(after=500),
}
"""How the first arrival of an order's charge is treated, by the first word of the order's name."""

ALWAYS: Final = {
    ("deaf", "payment.charge"): Mood(before=503),
    ("mute", "payment.charge"): Mood(forgets=True),
    ("unprocessable", "shipment.create"): Mood(before=422),
}
"""How each arrival of this kind is treated."""

REFUSALS: Final = {
    ("declined", "payment.charge"): "declined",
    ("undeliverable", "shipment.create"): "undeliverable",
}
"""Who is told no, in a reply, and with which code."""

IN_THE_ANSWER: Final = frozenset({"answered", "both"})
"""Whose commands are answered with the reply; of `both` it is posted as well."""

GATED: Final = frozenset(
    {
        ("gated", "shipment.create"),
        ("abreast", "stock.reserve"),
        ("abreast", "payment.charge"),
        ("unpaid", "payment.charge"),
    }
)
"""Whose commands are replied to when the gate is open."""

TROUBLES: Final = (
    Mood(before=503),
    Mood(before=500),
    Mood(after=503),
    Mood(after=503, forgets=True),
    Mood(after="cut"),
    Mood(after="cut", forgets=True),
    Mood(after="silence", forgets=True),
)


def first_word(order: str) -> str:
    return order.partition("-")[0]


class Book:
    """An append-only file of JSON lines. What `write` returned from is on the disk."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._lines = 0

    def write(self, what: str, **fields: Json) -> None:
        with self._lock:
            self._lines += 1
            line = {"line": self._lines, "time": time.time(), "what": what, **fields}
            self._file.write(json.dumps(line).encode() + b"\n")
            os.fsync(self._file.fileno())


class Ledger:
    """What was done, what was undone, and who was told. Every method may be called from any thread."""

    def __init__(self, book: Book, secrets: dict[str, dict[str, str]], options: argparse.Namespace) -> None:
        self.book = book
        self._commands = {name: Webhook(pair["commands"]) for name, pair in secrets.items()}
        self._replies = {name: Webhook(pair["replies"]) for name, pair in secrets.items()}
        self._options = options
        self._lock = threading.Lock()
        self._arrivals: Counter[str] = Counter()
        self._outcomes: dict[str, tuple[str, Json]] = {}  # by idempotency key: suffix and data of the reply
        self._done: dict[str, bool] = {}  # by message id: whether it had an effect
        self._never_do: set[str] = set()  # message ids that were undone before they came
        self._written: dict[str, bytes] = {}  # by message id: the reply
        self._owed: set[str] = set()  # message ids whose reply is not taken yet
        self._withheld: dict[str, tuple[str, Event]] = {}  # replies that wait for the undo of their command
        self._posting = 0
        self._handling: set[int] = set()  # the ports from which come the requests that are not answered yet

    # ---- commands ------------------------------------------------------------------------------------------

    def take(self, name: str, headers: dict[str, str], body: bytes) -> Answer:
        """Write an arrival down, act on it, and say how to answer it."""
        message = headers.get("webhook-id", "")
        with self._lock:
            self._arrivals[message] += 1
            nth = self._arrivals[message]
        self.book.write(
            "arrived",
            name=name,
            id=message,
            nth=nth,
            headers=headers,
            sha256=hashlib.sha256(body).hexdigest(),
            body=base64.b64encode(body).decode("ascii"),
        )
        try:
            event: Event = self._commands[name].verify(body, headers)
        except (KeyError, ValueError, WebhookVerificationError) as error:
            self.book.write("unproven", id=message, error=type(error).__name__)
            return 401
        mood = self._mood(event, nth)
        self._think(event, nth)
        if mood.before is not None:
            return mood.before
        with self._lock:
            outcome = self._act(event)
            reply = self._written.setdefault(event["id"], reply_to(event, *outcome, name=name))
        word = first_word(event["data"]["order"])
        if word != "answered" and not mood.forgets:
            self._owe(name, event)
        return reply if word in IN_THE_ANSWER and mood.after == 202 else mood.after

    def _mood(self, event: Event, nth: int) -> Mood:
        kind, order = event["type"], event["data"]["order"]
        word = first_word(order)
        if (word, kind) in ALWAYS:
            return ALWAYS[word, kind]
        if word in FIRST_CHARGE and kind == "payment.charge" and nth == 1:
            return FIRST_CHARGE[word]
        chance = self._chance("trouble", event, nth)
        if nth <= 2 and chance.random() < self._options.trouble:
            return chance.choice(TROUBLES)
        return Mood()

    def _think(self, event: Event, nth: int) -> None:
        time.sleep(self._chance("think", event, nth).uniform(0, THINKING_SECONDS_MAX))

    def _chance(self, what: str, event: Event, nth: int) -> random.Random:
        """The same draws for the same order, command and arrival, in whatever order they come."""
        return random.Random(f"{self._options.seed}/{what}/{event['data']['order']}/{event['type']}/{nth}")

    def _act(self, event: Event) -> tuple[str, Json]:
        """What became of a command: for one whose key is known, what became of it then."""
        key, message, kind = event["idempotencykey"], event["id"], event["type"]
        if key in self._outcomes:
            return self._outcomes[key]
        order = event["data"]["order"]
        code = self._refusal(event)
        self._done[message] = code is None
        if code is not None:
            self.book.write("refused", key=key, id=message, type=kind, order=order, code=code)
            outcome = ".refused", {"code": code, "message": f"{kind} of {order}", "detail": None}
        elif "undoes" in event:
            done = self._done.get(event["undoes"])
            if done is None:
                self._never_do.add(event["undoes"])
            effect = {True: "undone", False: "nothing to undo", None: "undone before done"}[done]
            self.book.write(
                effect,
                key=key,
                id=message,
                type=kind,
                order=order,
                undoes=event["undoes"],
                known=event["known"],
            )
            outcome = ".done", None
        else:
            self.book.write("done", key=key, id=message, type=kind, order=order)
            outcome = ".done", result_of(kind, order)
        self._outcomes[key] = outcome
        return outcome

    def _refusal(self, event: Event) -> str | None:
        """Why a command is refused, if it is."""
        if event["id"] in self._never_do:
            return "undone"
        if datetime.now(UTC) > datetime.fromisoformat(event["expirytime"]):
            return "expired"
        return REFUSALS.get((first_word(event["data"]["order"]), event["type"]))

    # ---- replies -------------------------------------------------------------------------------------------

    def _owe(self, name: str, event: Event) -> None:
        """See to it that the reply to `event` is posted, now and by itself."""
        message = event["id"]
        with self._lock:
            if message in self._owed:
                return
            self._owed.add(message)
            if first_word(event["data"]["order"]) == "late" and event["type"] == "payment.charge":
                self._withheld[message] = (name, event)
                return
            first = self._withheld.pop(event.get("undoes", ""), None)
        posts = [(name, event)] if first is None else [first, (name, event)]
        threading.Thread(target=self._post_all, args=(posts,), daemon=True).start()

    def _post_all(self, posts: list[tuple[str, Event]]) -> None:
        for name, event in posts:
            self._wait(event)
            self._approve(name, event)
            self._post_until_taken(name, event, self._written[event["id"]])
            with self._lock:
                self._owed.discard(event["id"])
            word = first_word(event["data"]["order"])
            if word == "twice":
                self._post(name, event, self._written[event["id"]])
            if word == "forged":
                forged = json.loads(self._written[event["id"]]) | {"data": {"charge": "forged"}}
                self._post(name, event, json.dumps(forged).encode())

    def _wait(self, event: Event) -> None:
        order, kind = event["data"]["order"], event["type"]
        time.sleep(self._chance("ponder", event, 1).uniform(0, self._options.ponder))
        while (first_word(order), kind) in GATED and not self._options.gate.exists():
            time.sleep(GATE_SECONDS)

    def _approve(self, name: str, event: Event) -> None:
        """Of `approved` orders: post the event that they wait for, before they do or after, as it happens."""
        order = event["data"]["order"]
        if first_word(order) != "approved" or event["type"] != "stock.reserve":
            return
        body = json.dumps(approval_of(order, name=name)).encode()
        late = self._chance("approve", event, 1).choice((0.0, self._options.ponder))
        threading.Thread(
            target=self._publish_until_taken, args=(name, event["replyto"], body, late), daemon=True
        ).start()

    def _publish_until_taken(self, name: str, to: str, body: bytes, late: float) -> None:
        time.sleep(late)
        while True:
            sent, status, *_ = self._send(name, to, body)
            self.book.write("published", id=json.loads(body)["id"], sent=sent, status=status)
            if status == 202:
                return
            time.sleep(PAUSE_SECONDS[-1])

    def _post_until_taken(self, name: str, event: Event, reply: bytes) -> None:
        tries = 0
        while self._post(name, event, reply) != 202:
            time.sleep(PAUSE_SECONDS[min(tries, len(PAUSE_SECONDS) - 1)])
            tries += 1

    def _post(self, name: str, event: Event, reply: bytes) -> int | None:
        """Post a reply once; the status of the answer, None when there was none."""
        sent, status, said, inbox, error = self._send(name, event["replyto"], reply)
        self.book.write(
            "posted",
            id=json.loads(reply)["id"],
            causation=event["id"],
            sha256=hashlib.sha256(reply).hexdigest(),
            sent=sent,
            status=status,
            answer=said,
            inbox=inbox,
            error=error,
        )
        return status

    def _send(self, name: str, url: str, body: bytes) -> tuple[bool, int | None, str, str, str]:
        """Post `body` once, freshly signed: whether all of it was written, the answer's status, body and inbox
        header, and what came instead of an answer.
        """
        message = json.loads(body)["id"]
        now = datetime.now(UTC)
        headers = {
            "content-type": CLOUDEVENT,
            "webhook-id": message,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": self._replies[name].sign(message, now, body.decode()),
        }
        to = urlsplit(url)
        status, said, inbox, sent, error = None, "", "", False, ""
        conn = http.client.HTTPConnection(to.hostname or "", to.port, timeout=POST_SECONDS_MAX)
        try:
            conn.request("POST", to.path, body, headers)
            sent = True
            with self._in_flight():
                answer = conn.getresponse()
            status, said, inbox = answer.status, answer.read().decode(), answer.getheader("x-inbox", "")
        except (OSError, http.client.HTTPException) as met:
            error = type(met).__name__
        finally:
            conn.close()
        return sent, status, said, inbox, error

    @contextmanager
    def _in_flight(self) -> Generator[None]:
        with self._lock:
            self._posting += 1
        try:
            yield
        finally:
            with self._lock:
                self._posting -= 1

    @contextmanager
    def handling(self, port: int) -> Generator[None]:
        with self._lock:
            self._handling.add(port)
        try:
            yield
        finally:
            with self._lock:
                self._handling.discard(port)

    def standing(self) -> dict[str, Json]:
        """How many replies are on their way: written to the receiver and not answered; owed, and not taken yet. And
        from where come the commands that are not answered.
        """
        with self._lock:
            return {
                "posting": self._posting,
                "owed": len(self._owed - self._withheld.keys()),
                "handling": sorted(self._handling),
            }


def result_of(kind: str, order: str) -> Json:
    """What the service says when it has acted."""
    what = {"stock.reserve": "reservation", "payment.charge": "charge", "shipment.create": "tracking"}[kind]
    return {what: f"{what}-{order}"}


def approval_of(order: str, *, name: str) -> Event:
    """The event that says yes to an order, the same each time."""
    return {
        "specversion": "1.0",
        "id": f"approval-{order}",
        "source": f"/ledger/{name}",
        "type": "order.approved",
        "subject": order,
        "datacontenttype": "application/json",
        "data": {"order": order, "by": name},
    }


def reply_to(event: Event, suffix: str, data: Json, *, name: str) -> bytes:
    """The reply's bytes, made once."""
    reply = {
        "specversion": "1.0",
        "id": str(uuid5(NAMESPACE_URL, f"{name}/{event['id']}")),
        "source": f"/ledger/{name}",
        "type": event["type"] + suffix,
        "time": datetime.now(UTC).isoformat(),
        "datacontenttype": "application/json",
        "causationid": event["id"],
        "correlationid": event["correlationid"],
        "traceparent": event["traceparent"],
        "data": data,
    }
    return json.dumps(reply).encode()


class Handler(BaseHTTPRequestHandler):
    """`POST /<service>` is a command; `GET /` says what is on its way."""

    protocol_version = "HTTP/1.1"
    ledger: Ledger

    def do_POST(self) -> None:
        with self.ledger.handling(self.client_address[1]):
            self._handle()

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.ledger.take(self.path.strip("/"), headers, body)
        said = 200 if isinstance(answer, bytes) else answer
        self.ledger.book.write("answered", id=headers.get("webhook-id", ""), answer=said)
        if answer == "silence":
            with suppress(OSError):
                self.rfile.read(1)  # until the caller has enough
        if isinstance(answer, bytes):
            self._say(200, answer, type_=CLOUDEVENT)
        elif isinstance(answer, int):
            self._say(answer, b"")
        else:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._say(200, json.dumps(self.ledger.standing()).encode())

    def _say(self, status: int, body: bytes, *, type_: str = "application/json") -> None:
        try:
            self.send_response(status)
            self.send_header("content-type", type_)
            if status == 429:
                self.send_header("retry-after", "1")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # whoever called was killed meanwhile
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002  # the base's own word


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Callers are killed in the middle of a request; all else is a fault of the ledger and is told."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]  # passed through


def main() -> None:
    parser = argparse.ArgumentParser(description="The services of the acceptance tests.")
    parser.add_argument("--book", type=Path, required=True)
    parser.add_argument("--gate", type=Path, required=True, help="what is GATED waits for it")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--trouble", type=float, default=0.0, help="of 1: arrivals that are treated badly")
    parser.add_argument(
        "--ponder", type=float, default=0.05, metavar="SECONDS", help="at most, before a reply"
    )
    options = parser.parse_args()
    Handler.ledger = Ledger(Book(options.book), json.loads(os.environ["LEDGER_SECRETS"]), options)
    with Server(("127.0.0.1", 0), Handler) as server:
        sys.stdout.write(f"ledger at {server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
