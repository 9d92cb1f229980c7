"""What an endpoint may want besides a body and a signature: headers of its own, its own certificates.

What is ours to say may not be said again: a second `webhook-id` or another length would be a way into somebody's
parser. Names and values are checked when they are set, and once more before they are sent.
"""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from contracts.errors import shown

HEADERS_MAX: Final = 20  # headers of one endpoint
HEADER_BYTES_MAX: Final = 4096  # of one of their values

OURS: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "idempotency-key",
        "keep-alive",
        "proxy-authorization",
        "te",
        "traceparent",
        "tracestate",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "waypost-attempt",
    }
)
OUR_BEGINNINGS: Final = ("webhook-", "ce-", "proxy-")
TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
VALUE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?")
FILES: Final = frozenset({"ca", "certificate", "key"})


def header_problems(headers: object) -> list[str]:
    """What is wrong with these headers of an endpoint; never a value, since one may be a token."""
    if not isinstance(headers, Mapping):
        return ["headers: expected names and values"]
    found = cast("Mapping[str, Any]", headers)
    problems = (
        [f"headers: expected at most {HEADERS_MAX}, found {len(found)}"] if len(found) > HEADERS_MAX else []
    )
    for name, value in found.items():
        lower = name.lower()
        if not TOKEN.fullmatch(name):
            problems.append(f"header {shown(name)}: expected letters, digits and hyphens")
        elif lower in OURS or lower.startswith(OUR_BEGINNINGS):
            problems.append(f"header {shown(name)}: expected another name, this one is ours to say")
        elif not isinstance(value, str) or len(value) > HEADER_BYTES_MAX or not VALUE.fullmatch(value):
            problems.append(
                f"header {shown(name)}: expected printable ASCII, at most {HEADER_BYTES_MAX} characters"
            )
    if len({name.lower() for name in found}) < len(found):
        problems.append("headers: expected each name once")
    return problems


def tls_problems(tls: object) -> list[str]:
    """What is wrong with these names of files; the files are the relay's, and looked at there."""
    if not isinstance(tls, Mapping):
        return ["tls: expected names and files"]
    found = cast("Mapping[str, Any]", tls)
    problems = [
        f"tls {shown(name)}: expected one of {', '.join(sorted(FILES))}"
        for name in found
        if name not in FILES
    ]
    problems += [
        f"tls {shown(name)}: expected the whole path of a file"
        for name, path in found.items()
        if not (isinstance(path, str) and path.startswith("/"))
    ]
    if "key" in found and "certificate" not in found:
        problems.append("tls key: expected a certificate too")
    return problems


class Certificates:
    """Contexts of endpoints with certificates of their own, made anew when a file changes."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[str, str, int], ...], ssl.SSLContext] = {}

    def context(self, tls: Mapping[str, str]) -> ssl.SSLContext | None:
        """Verifies with `ca` (else with those of the system), shows `certificate`. None when nothing is said.

        Raises OSError or ssl.SSLError when a file is not there or is none.
        """
        if not tls:
            return None
        key = tuple((name, path, Path(path).stat().st_mtime_ns) for name, path in sorted(tls.items()))
        if key not in self._made:
            context = ssl.create_default_context(cafile=tls.get("ca"))
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if "certificate" in tls:
                context.load_cert_chain(tls["certificate"], tls.get("key"))
            if len(self._made) >= 1_000:
                self._made.clear()
            self._made[key] = context
        return self._made[key]
