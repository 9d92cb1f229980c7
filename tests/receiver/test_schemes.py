"""One verifier for all schemes, against the vectors that their authors publish, and against what must not pass."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, Final

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from multidict import CIMultiDict

from contracts.errors import BadSecret, BadSignature
from contracts.signature import Secret, sign
from receiver.authenticity import DECOY, Verifier, mac_of, parse_secret, written
from receiver.schemes import PRESETS, SettingsInvalid, policy_of

AT: Final = 1614265330
ID: Final = "msg_p5jXN8AQM9LWM0D4loKWxJek"
BODY: Final = b'{"test": 2432232314}'
WHSEC: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SIGNED: Final = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
ELSE: Final = "v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc="
PUBLIC: Final = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="
BY_KEY: Final = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="
STRIPE_BODY: Final = (
    b'{\n  "id": "evt_test_webhook",\n  "object": "event",\n'
    b'  "data": { "object": { "id": "rdr_123", "object": "terminal.reader" } }\n}'
)
STRIPE_SIGNED: Final = "117f2d4aa1697fc9f837f2feca4e5e23ec790ffa7b6b669073d3677ae48c4b5f"
SLACK_BODY: Final = (
    b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
    b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
    b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F"
    b"96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
)


def verify(
    scheme: str,
    secrets: list[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: int = AT,
    settings: Mapping[str, Any] | None = None,
) -> None:
    form = policy_of(scheme, settings or {}).signature
    verifier = Verifier(form, [parse_secret(form, secret) for secret in secrets])
    verifier.verify(verifier.proof(CIMultiDict(headers)), body, now=now)


def standard(signature: str, **changes: str) -> dict[str, str]:
    return {"webhook-id": ID, "webhook-timestamp": str(AT), "webhook-signature": signature} | changes


VECTORS: Final = [
    pytest.param("standard-webhooks", WHSEC, standard(SIGNED), BODY, AT, id="standard-webhooks-v1"),
    pytest.param("standard-webhooks", PUBLIC, standard(BY_KEY), BODY, AT, id="standard-webhooks-v1a"),
    pytest.param(
        "svix",
        WHSEC,
        {"svix-id": ID, "svix-timestamp": str(AT), "svix-signature": SIGNED},
        BODY,
        AT,
        id="svix-headers",
    ),
    pytest.param(
        "standard-webhooks",
        WHSEC,
        standard(f"{ELSE} v2,{ELSE[3:]} {SIGNED} {ELSE}"),
        BODY,
        AT,
        id="one-of-many",
    ),
    pytest.param(
        "stripe",
        "whsec_test_secret",
        {"stripe-signature": f"t={AT},v1={STRIPE_SIGNED},v0={'0' * 64}"},
        STRIPE_BODY,
        AT,
        id="stripe",
    ),
    pytest.param(
        "github",
        "It's a Secret to Everybody",
        {"x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"},
        b"Hello, World!",
        AT,
        id="github",
    ),
    pytest.param(
        "slack",
        "8f742231b10e8888abcd99yyyzzz85a5",
        {
            "x-slack-request-timestamp": "1531420618",
            "x-slack-signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
        },
        SLACK_BODY,
        1531420618,
        id="slack",
    ),
    pytest.param(
        "shopify",
        "hush",
        {"x-shopify-hmac-sha256": "3+Yq/TpwjqJ7IXuMq8EfED7b+y0XbokqOKLUdagDxMI="},
        b'{"a":1}',
        AT,
        id="shopify",
    ),
    pytest.param(
        "bearer", "a token of ours", {"authorization": "Bearer a token of ours"}, b"", AT, id="bearer"
    ),
]
"""Scheme, secret, headers, body, time."""


@pytest.mark.parametrize(("scheme", "secret", "headers", "body", "now"), VECTORS)
def test_a_vector_of_its_authors_is_authentic_and_nothing_that_was_changed_is(
    scheme: str, secret: str, headers: dict[str, str], body: bytes, now: int
) -> None:
    verify(scheme, [secret], headers, body, now=now)
    verify(scheme, [other(scheme), secret], headers, body, now=now)

    if scheme != "bearer":
        with pytest.raises(BadSignature, match="mismatch"):
            verify(scheme, [secret], headers, body + b" ", now=now)
    with pytest.raises(BadSignature, match="mismatch"):
        verify(scheme, [other(scheme)], headers, body, now=now)
    with pytest.raises(BadSignature, match="mismatch"):
        verify(scheme, [], headers, body, now=now)
    for name in headers:
        with pytest.raises(BadSignature):
            verify(
                scheme, [secret], {it: value for it, value in headers.items() if it != name}, body, now=now
            )


def other(scheme: str) -> str:
    return (
        "whsec_" + base64.b64encode(bytes(32)).decode() if policy_of(scheme, {}).signature.public else "else"
    )


@pytest.mark.parametrize("secret", ["MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaS", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwBr"])
def test_a_secret_without_padding_verifies_an_empty_body_too(secret: str) -> None:
    key = base64.b64decode(secret + "=" * (-len(secret) % 4))

    verify(
        "standard-webhooks",
        [secret],
        standard(sign([Secret(key)], message_id=ID, timestamp=AT, body=b"")),
        b"",
    )


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", "whsec_!", "whpk_AAAA"])
def test_what_is_no_secret_of_standard_webhooks_is_refused(secret: str) -> None:
    with pytest.raises(BadSecret) as refused:
        parse_secret(policy_of("standard-webhooks", {}).signature, secret)

    assert not secret or secret not in str(refused.value)


@pytest.mark.parametrize(
    "signature",
    [
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OA=",
        "v1,dawfeoifkpqwoekfpqoekf",
        SIGNED[:8],
        "v1,",
        "v1garbage",
        "v1,!!" + SIGNED[3:],
        "  ",
        ",,",
        "v1,é",
        "v0," + SIGNED[3:],
        "none," + SIGNED[3:],
        "v1a," + SIGNED[3:],
        "v1," + BY_KEY[4:],
        " ".join([ELSE] * 5 + [SIGNED]),
        " ".join([ELSE] * 10_000),
    ],
)
def test_what_is_no_signature_is_a_mismatch_and_no_error(signature: str) -> None:
    with pytest.raises(BadSignature, match="mismatch"):
        verify("standard-webhooks", [WHSEC, PUBLIC], standard(signature), BODY)


@pytest.mark.parametrize(
    "timestamp",
    ["hello", "1.6e9", " 1614265330", "1_614_265_330", "+1614265330", "\uff11\uff16\uff11\uff14265330"],
)
@pytest.mark.parametrize("scheme", ["standard-webhooks", "slack", "stripe"])
def test_a_timestamp_is_ascii_digits_in_every_scheme(scheme: str, timestamp: str) -> None:
    headers = {
        "standard-webhooks": standard(SIGNED) | {"webhook-timestamp": timestamp},
        "slack": {"x-slack-request-timestamp": timestamp, "x-slack-signature": "v0=" + "0" * 64},
        "stripe": {"stripe-signature": f"t={timestamp},v1={STRIPE_SIGNED}"},
    }[scheme]

    with pytest.raises(BadSignature, match=r"malformed|mismatch"):
        verify(scheme, [other(scheme)], headers, BODY)


@pytest.mark.parametrize("stamps", ["", f"t={AT},t={AT},"])
def test_a_stripe_header_names_one_time(stamps: str) -> None:
    with pytest.raises(BadSignature, match="malformed"):
        verify(
            "stripe", ["whsec_test_secret"], {"stripe-signature": f"{stamps}v1={STRIPE_SIGNED}"}, STRIPE_BODY
        )


@pytest.mark.parametrize(("now", "reason"), [(AT + 301, "stale"), (AT - 301, "ahead")])
def test_only_what_is_signed_is_stale_or_ahead(now: int, reason: str) -> None:
    headers = {"stripe-signature": f"t={AT},v1={STRIPE_SIGNED}"}

    with pytest.raises(BadSignature, match=reason):
        verify("stripe", ["whsec_test_secret"], headers, STRIPE_BODY, now=now)
    with pytest.raises(BadSignature, match="mismatch"):
        verify("stripe", ["whsec_another"], headers, STRIPE_BODY, now=now)

    verify("stripe", ["whsec_test_secret"], headers, STRIPE_BODY, now=AT + 300)
    verify(
        "stripe",
        ["whsec_test_secret"],
        headers,
        STRIPE_BODY,
        now=now,
        settings={"signature": {"tolerance": 302}},
    )


def test_both_secrets_of_a_rotation_prove_a_sender_while_both_sign() -> None:
    # Coolhand-Labs/coolhand-ruby 123 (c): one signature of several was looked at.
    headers = {"stripe-signature": f"t={AT},v1={'0' * 64},v1={STRIPE_SIGNED}"}

    verify("stripe", ["whsec_new", "whsec_test_secret"], headers, STRIPE_BODY)


@pytest.mark.parametrize("digest", ["sha1", "sha256", "sha512"])
@pytest.mark.parametrize("encoding", ["hex", "base64", "base64url"])
@pytest.mark.parametrize("written_as", ["text", "hex", "base64"])
def test_a_generic_signature_is_made_as_its_settings_say(digest: str, encoding: str, written_as: str) -> None:
    key = b"\xfb\xff secret \xfe" if written_as != "text" else b"a secret"
    text = {"text": "a secret", "hex": key.hex(), "base64": base64.b64encode(key).decode()}[written_as]
    mac = hmac.digest(key, f"v9|msg-1|{AT}|".encode() + BODY + b"|end", digest)
    value = {
        "hex": mac.hex(),
        "base64": base64.b64encode(mac).decode(),
        "base64url": base64.urlsafe_b64encode(mac).decode(),
    }[encoding]
    settings = {
        "signature": {
            "header": "x-acme-signature",
            "id": "x-acme-id",
            "timestamp": "x-acme-time",
            "label": "mac=",
            "template": "v9|{id}|{timestamp}|{body}|end",
            "digest": digest,
            "encoding": encoding,
            "spelling": written_as,
        }
    }
    headers = {"X-Acme-Signature": f"mac={value}", "X-Acme-Id": "msg-1", "X-Acme-Time": str(AT)}

    verify("hmac", [text], headers, BODY, settings=settings)

    for changed in ({"X-Acme-Signature": value}, {"X-Acme-Id": "msg-2"}, {"X-Acme-Time": str(AT + 1)}):
        with pytest.raises(BadSignature, match="mismatch"):
            verify("hmac", [text], headers | changed, BODY, settings=settings)


@pytest.mark.parametrize(
    "given", ["Bearer tokeN", "Bearer token ", "token", "bearer token", "Bearer ", "Bearer tok\udcffn"]
)
def test_a_token_is_compared_whole(given: str) -> None:
    with pytest.raises(BadSignature):
        verify("bearer", ["token"], {"authorization": given}, b"")


def test_a_public_key_verifies_what_its_private_half_signed_and_no_mac() -> None:
    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    public = "whpk_" + base64.b64encode(private.public_key().public_bytes_raw()).decode()
    signed = private.sign(f"{ID}.{AT}.".encode() + BODY)

    verify("standard-webhooks", [public], standard(f"v1a,{base64.b64encode(signed).decode()}"), BODY)

    forged = hmac.digest(private.public_key().public_bytes_raw(), f"{ID}.{AT}.".encode() + BODY, "sha256")
    for label in ("v1", "v1a"):
        with pytest.raises(BadSignature, match="mismatch"):
            verify(
                "standard-webhooks", [public], standard(f"{label},{base64.b64encode(forged).decode()}"), BODY
            )


@pytest.mark.parametrize("digest", ["sha1", "sha256", "sha512"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 512])
def test_a_mac_of_a_prepared_key_is_the_mac(digest: str, length: int) -> None:
    key = bytes(number % 251 for number in range(length))
    mac = mac_of(key, digest)

    for text in (b"", BODY, BODY * 100, BODY):
        assert mac(text) == hmac.digest(key, text, digest)


@pytest.mark.parametrize(
    "template", ["{{id}}{timestamp}{x {body} }", "{0}{id}%s{body}{{{timestamp}", "{body}"]
)
def test_a_template_is_filled_as_it_stands(template: str) -> None:
    form = policy_of("standard-webhooks", {"signature": {"template": template}}).signature
    signed = template.replace("{id}", ID).replace("{timestamp}", str(AT)).encode().replace(b"{body}", BODY)
    made = base64.b64encode(hmac.digest(Secret.parse(WHSEC).key, signed, "sha256")).decode()
    verifier = Verifier(form, [Secret.parse(WHSEC)])

    verifier.verify(verifier.proof(standard(f"v1,{made}")), BODY, now=AT)


def test_the_secret_that_stands_for_none_proves_nobody() -> None:
    signed = sign([DECOY], message_id=ID, timestamp=AT, body=BODY)

    for secrets in ([], [PUBLIC]):
        with pytest.raises(BadSignature, match="mismatch"):
            verify("standard-webhooks", secrets, standard(signed), BODY)
    with pytest.raises(BadSignature, match="mismatch"):
        verify("bearer", [], {"authorization": "Bearer " + DECOY.key.decode()}, BODY)


@pytest.mark.parametrize("scheme", [*PRESETS])
def test_a_secret_is_shown_as_it_was_written(scheme: str) -> None:
    form = policy_of(scheme, {}).signature
    text = WHSEC if form.spelling == "whsec" else "whsec_test_secret"

    assert written(form, parse_secret(form, text)) == text


@pytest.mark.parametrize(
    ("scheme", "settings", "told"),
    [
        ("noop", {}, "scheme: expected one of"),
        ("hmac", {"signatures": {}}, "signatures: there is no such setting"),
        ("hmac", {"signature": {"digest": "md5"}}, "signature.digest"),
        ("hmac", {"signature": {"template": "{url}.{body}"}}, "template: expected"),
        ("hmac", {"signature": {"template": "v1"}}, "expected {body}, once"),
        ("hmac", {"signature": {"template": "{id}{body}"}}, "id: expected the header"),
        ("hmac", {"signature": {"template": "{timestamp}{body}"}}, "timestamp: expected the header"),
        ("hmac", {"signature": {"header": "X Signature"}}, "signature.header"),
        ("hmac", {"signature": {"layout": "list"}}, "label: expected one"),
        ("hmac", {"event": {"type": "/type"}}, "event.source"),
        ("stripe", {"event": {"key": "data object"}}, "event.key"),
        ("stripe", {"rate": 0}, "rate"),
        ("stripe", {"signature": None}, "signature"),
    ],
)
def test_settings_that_nobody_understands_are_refused_by_name(
    scheme: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        policy_of(scheme, settings)

    assert told in str(refused.value)


def test_each_preset_is_whole() -> None:
    for scheme in PRESETS:
        policy = policy_of(scheme, {})
        assert policy.signature.header, scheme
        assert hashlib.new(policy.signature.digest).digest_size >= 32, scheme
