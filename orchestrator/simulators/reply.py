"""Who sent a request, and the reply to it when it is a command."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from contracts.envelope import STRUCTURED, decode_structured
from contracts.errors import BadSignature, MalformedEvent, MalformedJson
from orchestrator.simulators.server import Request, response
from receiver import replies
from receiver.authenticity import Key, Verifier
from receiver.schemes import policy_of

SOURCE: Final = "/simulator"
FORM: Final = policy_of("standard-webhooks", {}).signature
IDS: Final = (*FORM.id, "x-github-delivery", "x-shopify-webhook-id")
"""Headers that may have the id of a message."""


def id_of(request: Request) -> str:
    return next((found for name in IDS if (found := request.headers.get(name))), "")


def verdict(request: Request, secrets: Sequence[Key]) -> str:
    """`verified`, why it is not (`missing`, `malformed`, `mismatch`, `stale`, `ahead`), or `unchecked` without a
    secret.
    """
    if not secrets:
        return "unchecked"
    verifier = Verifier(FORM, secrets)
    try:
        verifier.verify(verifier.proof(request.headers), request.body, now=int(time.time()))
    except BadSignature as error:
        return error.reason
    return "verified"


def reply_to(request: Request, secrets: Sequence[Key], *, end: str, value: Any, code: str) -> bytes:
    """The answer that is the reply to a command, when somebody who has the secret sent it. `end` is how the command
    ended: `done` with a value, `refused` with a code, or else failed with one.
    """
    found = verdict(request, secrets)
    if found == "unchecked":
        return response(501, body=b"expected a secret, found none")
    if found != "verified":
        return response(401, body=found.encode())
    try:
        command = decode_structured(request.body)
    except (MalformedEvent, MalformedJson) as error:
        return response(400, body=str(error).encode())
    if end == "done":
        made = replies.done(command, source=SOURCE, value=value)
    else:
        make = replies.refused if end == "refused" else replies.failed
        made = make(command, source=SOURCE, code=code, message="simulated")
    return response(200, f"Content-Type: {STRUCTURED}", body=made.body)
