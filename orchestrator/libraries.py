"""What libraries and forgotten tasks say, as moments: in the same lines as everything else, and escaped."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from contracts.observer import Observer


class Spoken(logging.Handler):
    """Gives `observer` a moment `library.logged` for each record."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(logging.WARNING)
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        more = {} if error is None else {"error": error}
        self._observer.saw(
            "library.logged", logger=record.name, level=record.levelname, message=words(record), **more
        )


def words(record: logging.LogRecord) -> str:
    """The record's message; its template, where the arguments do not fit that."""
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  # of somebody else's arguments
        return str(record.msg)


def hear(observer: Observer) -> None:
    """From now on, log records of the process and failures that nobody awaits go to `observer`.

    Call it inside the event loop.
    """
    logging.root.handlers = [Spoken(observer)]
    logging.root.setLevel(logging.WARNING)

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        more = {} if error is None else {"error": error}
        observer.saw("task.failed", message=str(context.get("message")), **more)

    asyncio.get_running_loop().set_exception_handler(failed)
