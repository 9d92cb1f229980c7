"""Requests proved as a scheme of `receiver/schemes.py` says: what `receiver.authenticity` verifies, the other way."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from contracts.errors import BadSecret
from contracts.signature import SIGNING_PREFIX, PublicKey, Secret, Signer, SigningKey
from receiver.authenticity import fillable, parse_secret
from receiver.schemes import Proving

ENCODERS: Final[Mapping[str, Callable[[bytes], str]]] = {
    "hex": bytes.hex,
    "base64": lambda made: base64.b64encode(made).decode("ascii"),
    "base64url": lambda made: base64.urlsafe_b64encode(made).decode("ascii"),
}


def parse_signer(form: Proving, text: str) -> Signer:
    """What somebody wrote down as the secret of such a provider. Raises BadSecret, which does not repeat it."""
    if form.public and text.strip().startswith(SIGNING_PREFIX):
        return SigningKey.parse(text)
    found = parse_secret(form, text)
    if isinstance(found, PublicKey):
        raise BadSecret("secret: expected one that signs, found a public key")
    return found


def signs_with_many(form: Proving) -> bool:
    """Whether a header of that form may have a signature by each of several secrets."""
    return form.kind == "hmac" and form.layout != "bare"


def proof(
    form: Proving, keys: Sequence[Signer], *, message_id: str, timestamp: int, body: bytes, spelling: int = 0
) -> dict[str, str]:
    """The headers that prove `body`. Where one signature has room only, it is the first key's. `spelling` says which of
    the names that headers may have.
    """
    headers = {form.header[spelling]: signature(form, keys, message_id, timestamp, body)}
    if form.id:
        headers[form.id[spelling]] = message_id
    if form.timestamp:
        headers[form.timestamp[spelling]] = str(timestamp)
    return headers


def signature(form: Proving, keys: Sequence[Signer], message_id: str, timestamp: int, body: bytes) -> str:
    if form.kind == "token":
        return form.label + written(keys[0])
    head, _, tail = form.template.partition("{body}")
    before, after = (fillable(part).format(message_id, timestamp).encode("ascii") for part in (head, tail))
    made = [signature_by(form, key, before + body + after) for key in keys]
    match form.layout:
        case "bare":
            return made[0]
        case "list":
            return " ".join(made)
        case _:
            return ",".join([f"{form.stamp}={timestamp}"] * bool(form.stamp) + made)


def signature_by(form: Proving, key: Signer, signed: bytes) -> str:
    """A signature as it stands in its header, its label before it."""
    comma = {"bare": "", "list": ",", "fields": "="}[form.layout]
    if isinstance(key, SigningKey):
        return f"{form.public}{comma}{ENCODERS['base64'](key.sign(signed))}"
    return f"{form.label}{comma}{ENCODERS[form.encoding](hmac.digest(key.key, signed, form.digest))}"


def written(key: Signer) -> str:
    """A token as it is sent."""
    return key.key.decode("utf-8", "surrogateescape") if isinstance(key, Secret) else key.text
