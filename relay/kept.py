"""What the log of tries keeps of an answer's headers: few, short, and nothing that may be a secret."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import SplitResult, urlsplit

from contracts.sensitive import REDACTED

KEPT: Final = (
    "allow",
    "content-type",
    "date",
    "location",
    "request-id",
    "retry-after",
    "server",
    "x-amzn-requestid",
    "x-correlation-id",
    "x-request-id",
)
"""Names of headers; all others are passed over, so cookies, tokens and signatures are."""

VALUE_MAX: Final = 512  # characters of one of them


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an answer that are worth reading later. `headers` knows names in any case."""
    found = {name: value for name in KEPT if (value := headers.get(name))}
    if "location" in found:
        found["location"] = place_in(found["location"])
    return {name: printable(value)[:VALUE_MAX] for name, value in found.items()}


def place_in(location: str) -> str:
    """Where a `Location` leads, without whom it is for: a query or a user may be a token."""
    try:
        url = urlsplit(location)
        host = url.netloc.rpartition("@")[2]
    except ValueError:
        return REDACTED
    query = REDACTED if url.query else ""
    return SplitResult(url.scheme, host, url.path, query, "").geturl()


def origin_of(location: str) -> str:
    """The first part of a `Location`, for logs that hold no payload in the clear; nothing of one that has none."""
    url = urlsplit(location)
    return f"{url.scheme}://{url.netloc}/{REDACTED}" if url.netloc else REDACTED


def printable(text: str) -> str:
    """What a table can hold: everything but visible ASCII and spaces is a question mark."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)
