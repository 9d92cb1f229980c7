"""Two services that are made as the documents say, and killed as anything else: `labels` posts its replies,
`stamps` answers with them.

    DESK_COMMANDS=whsec_… DESK_REPLIES=whsec_… python -m tests.acceptance.desk labels --port N --folder FOLDER

What they do is a line in the ledger's book, in `--folder`. When a run may have acted before, they look there
for its key before they act: that is what honouring the key means. Beside it `<name>.runs` says of each run
when it was begun and left, so that a kill in between can be told from one outside.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from contracts.signature import Secret
from receiver.memory import SqliteMemory
from receiver.participant import Delivery, Participant
from tests.acceptance.desk_contracts import Buy, Label, Print, Return, Stamp, Void

THINKING_SECONDS: Final = (0.1, 0.5)
"""Between acting and saying so, drawn for each run."""


class Desk:
    """What one of the services does, and where it writes it down."""

    def __init__(self, name: str, folder: Path) -> None:
        self._book = folder / "book"
        self._runs = folder / f"{name}.runs"

    def act(self, what: str, of: str, order: str, delivery: Delivery) -> None:
        """Act once for each key, though killed in between."""
        with self._run(delivery):
            if not (delivery.again and self._did(delivery.key)):
                undoing = (
                    {} if delivery.undoes is None else {"undoes": delivery.undoes, "known": delivery.known}
                )
                line = {"what": what, "type": of, "order": order, "key": delivery.key, "id": delivery.message}
                append(self._book, json.dumps({**line, **undoing}))
            time.sleep(random.uniform(*THINKING_SECONDS))

    @contextmanager
    def _run(self, delivery: Delivery) -> Generator[None]:
        append(self._runs, f"{os.getpid()} {'again' if delivery.again else 'begun'} {delivery.key}")
        yield
        append(self._runs, f"{os.getpid()} left {delivery.key}")

    def _did(self, key: str) -> bool:
        lines: list[dict[str, Any]] = [json.loads(line) for line in self._book.read_bytes().splitlines()]
        return any(line.get("key") == key for line in lines)


def append(file: Path, line: str) -> None:
    """Whole or not at all, between the lines of other processes, and on the disk."""
    with file.open("ab", buffering=0) as out:
        out.write(line.encode() + b"\n")
        os.fsync(out.fileno())


def labels(service: Participant, desk: Desk) -> None:
    @service.does(Print)
    def print_label(command: Print, delivery: Delivery) -> Label:
        desk.act("done", "label.print", command.order, delivery)
        return Label(label=f"label-{command.order}")

    @service.does(Void)
    def void(command: Void, delivery: Delivery) -> None:
        desk.act("undone", "label.void", command.order, delivery)


def stamps(service: Participant, desk: Desk) -> None:
    @service.does(Buy)
    def buy(command: Buy, delivery: Delivery) -> Stamp:
        desk.act("done", "stamp.buy", command.order, delivery)
        return Stamp(stamp=f"stamp-{command.order}")

    @service.does(Return)
    def give_back(command: Return, delivery: Delivery) -> None:
        desk.act("undone", "stamp.return", command.order, delivery)


DESKS: Final = {"labels": labels, "stamps": stamps}


def main() -> None:
    parser = argparse.ArgumentParser(description="A service of the acceptance tests, made with the helper.")
    parser.add_argument("name", choices=sorted(DESKS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    name, folder = options.name, options.folder
    service = Participant(
        name=name,
        accepts={"/waypost": Secret.parse(os.environ["DESK_COMMANDS"])},
        receiver_url=os.environ["WAYPOST_RECEIVER_URL"],
        secret=Secret.parse(os.environ["DESK_REPLIES"]),
        reply_in_answer=name == "stamps",
        memory=SqliteMemory(folder / f"{name}.sqlite"),
    )
    DESKS[name](service, Desk(name, folder))
    service.run(port=options.port)


if __name__ == "__main__":
    main()
