"""Answers of the receiver that are no mail: a challenge, and the handshake of the HTTP webhook specification.

Source: HTTP 1.1 Web Hooks for Event Delivery 1.0.2, section 4 (abuse protection).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from aiohttp import web

from receiver.schemes import Policy

CHALLENGE_CHARACTERS_MAX: Final = 512
"""Of what a provider wants to hear again; a longer text, or one that is not visible ASCII, is no challenge."""
ORIGIN: Final = re.compile(
    r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*"
)
RATE: Final = re.compile(r"[1-9][0-9]{0,8}")
SAFE: Final = {"Server": "waypost", "X-Content-Type-Options": "nosniff"}


def challenged(text: str) -> web.Response | None:
    """The text that an authentic sender asked to hear; None when it is none that could do no harm anywhere."""
    if not (
        0 < len(text) <= CHALLENGE_CHARACTERS_MAX
        and text.isascii()
        and text.isprintable()
        and " " not in text
    ):
        return None
    return web.Response(status=200, text=text, content_type="text/plain", headers=SAFE)


def consent(policy: Policy, origin: str, rate: str | None) -> web.Response | None:
    """What tells `origin` that it may post, and how often; None when it may not.

    Nothing is called back: an address in a request of a stranger is not one that we call.
    """
    if not is_allowed(policy.origins, origin):
        return None
    headers = {**SAFE, "Allow": "POST, OPTIONS", "WebHook-Allowed-Origin": origin}
    ours = None if policy.rate is None else max(int(policy.rate * 60), 1)
    if ours is not None:
        asked = int(rate) if rate is not None and RATE.fullmatch(rate) else ours
        headers["WebHook-Allowed-Rate"] = str(min(ours, asked))
    elif rate is not None:
        headers["WebHook-Allowed-Rate"] = "*"
    return web.Response(status=200, headers=headers)


def is_allowed(origins: Iterable[str], origin: str) -> bool:
    """Whether a host is one of `origins`: exactly, or below one that begins with `*.`; never because it looks alike."""
    host = origin.lower()
    if not ORIGIN.fullmatch(host):
        return False
    return any(host.endswith(it[1:].lower()) if it.startswith("*.") else host == it.lower() for it in origins)
