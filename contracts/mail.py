"""Mail at rest: what the inbox keeps of it where payloads are sealed."""

from __future__ import annotations

from contracts.codec import Sealing, place, seal_body, seal_document, seal_value


def mail_place(tenant: int, sender: str, source: str, event_id: str) -> str:
    """Where mail stands: under its name, which two never have."""
    return place("inbox", tenant, sender, source, event_id)


def data_at_rest(kind: str, data: str | None, where: str) -> str | None:
    """What mail says, as the inbox keeps it: an event as a box alone, all else with its public members."""
    codec = Sealing.codec
    if codec is None or data is None:
        return data
    if kind == "event":
        return seal_value(codec, data, where)
    return seal_document(codec, data, where, decides=kind == "order")


def body_at_rest(body: bytes | None, where: str) -> bytes | None:
    """The event as it came, as the inbox keeps it."""
    codec = Sealing.codec
    return body if codec is None or body is None else seal_body(codec, body, where, {})


def mail_at_rest(
    kind: str, data: str | None, body: bytes | None, name: tuple[int, str, str, str]
) -> tuple[str | None, bytes | None]:
    """What mail says and how it came, as the inbox keeps both. `name` is tenant, sender, source and event id."""
    if Sealing.codec is None:
        return data, body
    where = mail_place(*name)
    return data_at_rest(kind, data, where), body_at_rest(body, where)
