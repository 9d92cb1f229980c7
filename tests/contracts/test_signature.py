from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import BadSecret, BadSignature
from contracts.signature import PublicKey, Secret, SigningKey, sign, signer, verify

# Standard Webhooks, the vectors of its libraries' tests
SECRET = Secret.parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
AT = 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
OTHER = "v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc="


def check(
    signature: str = SIGNATURE,
    *,
    message_id: str = ID,
    timestamp: str = str(AT),
    body: bytes = BODY,
    now: int = AT,
) -> str:
    """Why the message is refused; empty when it is not."""
    try:
        verify([SECRET], message_id=message_id, timestamp=timestamp, signature=signature, body=body, now=now)
    except BadSignature as refused:
        return refused.reason
    return ""


def test_we_sign_as_the_specification_does() -> None:
    assert sign([SECRET], message_id=ID, timestamp=AT, body=BODY) == SIGNATURE


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        (SIGNATURE, ""),
        (f"{OTHER} {OTHER.replace('v1', 'v2')} {SIGNATURE} {OTHER}", ""),
        ("v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OA=", "mismatch"),
        ("v1,dawfeoifkpqwoekfpqoekf", "mismatch"),
        (SIGNATURE[:8], "mismatch"),
        ("v1,", "mismatch"),
        ("", "missing"),
        ("v1garbage", "mismatch"),
        (",,", "mismatch"),
        ("  ", "mismatch"),
        (SIGNATURE.replace("v1,", "v1,!!"), "mismatch"),
        (SIGNATURE.replace("v1", "v0"), "mismatch"),
        (SIGNATURE.replace("v1", "none"), "mismatch"),
        (SIGNATURE.replace("v1,", "V1,"), "mismatch"),
        ("v1,\uff470hM", "mismatch"),
        ("v1,\udce9", "mismatch"),
        (f"{OTHER}  {SIGNATURE}", ""),
    ],
)
def test_one_good_signature_among_others_is_enough_and_nothing_else_is(signature: str, reason: str) -> None:
    assert check(signature) == reason


def test_no_more_than_five_candidates_are_tried() -> None:
    assert check(" ".join([OTHER] * 4 + [SIGNATURE])) == ""
    assert check(" ".join([OTHER] * 5 + [SIGNATURE])) == "mismatch"
    assert check(" ".join([OTHER] * 10_000)) == "mismatch"


def test_the_clock_may_differ_by_five_minutes_to_either_side() -> None:
    assert check(now=AT + 300) == ""
    assert check(now=AT - 300) == ""
    assert check(now=AT + 301) == "stale"
    assert check(now=AT - 301) == "ahead"


def test_only_what_is_signed_is_called_stale() -> None:
    assert check(OTHER, now=AT + 301) == "mismatch"
    assert check(timestamp=str(AT + 600), now=AT + 600) == "mismatch"


@pytest.mark.parametrize(
    "timestamp",
    [
        "\uff11\uff16\uff11\uff14\uff12\uff16\uff15\uff13\uff13\uff10",
        f" {AT}",
        f"{AT}\n",
        "1_614_265_330",
        f"+{AT}",
        "1.6e9",
        f"{AT}.0",
        "hello",
        "9" * 13,
    ],
)
def test_a_timestamp_is_ascii_digits(timestamp: str) -> None:
    assert check(timestamp=timestamp) == "malformed"


@pytest.mark.parametrize("message_id", ["a.b", "a b", "ü", "x" * 513, "a\n"])
def test_an_id_is_visible_ascii_without_a_dot(message_id: str) -> None:
    assert check(message_id=message_id) == "malformed"
    with pytest.raises(ValueError, match="message id"):
        sign([SECRET], message_id=message_id, timestamp=AT, body=BODY)


def test_every_header_is_needed() -> None:
    assert check(message_id="") == "missing"
    assert check(timestamp="") == "missing"
    assert check("") == "missing"


@given(
    st.binary(max_size=64), st.lists(st.binary(min_size=24, max_size=64), min_size=1, max_size=3, unique=True)
)
def test_each_secret_of_a_rotation_verifies_alone(body: bytes, keys: list[bytes]) -> None:
    secrets = [Secret.of(key) for key in keys]

    signature = sign(secrets, message_id=ID, timestamp=AT, body=body)

    assert len(signature.split(" ")) == len(secrets)
    for secret in secrets:
        verify([secret], message_id=ID, timestamp=str(AT), signature=signature, body=body, now=AT)
        with pytest.raises(BadSignature):
            verify([secret], message_id=ID, timestamp=str(AT), signature=signature, body=body + b"x", now=AT)


def test_signing_needs_a_secret() -> None:
    with pytest.raises(ValueError, match="at least one secret"):
        sign([], message_id=ID, timestamp=AT, body=BODY)


@given(st.binary(min_size=24, max_size=64), st.text(st.characters(codec="utf-8")))
def test_the_python_package_accepts_ours_and_we_accept_its(key: bytes, text: str) -> None:
    secret, now = Secret.of(key), datetime.now(UTC).replace(microsecond=0)
    at, body = int(now.timestamp()), json.dumps(text)
    theirs = standardwebhooks.Webhook(secret.text)

    ours = sign([secret], message_id=ID, timestamp=at, body=body.encode())
    headers = {"webhook-id": ID, "webhook-timestamp": str(at), "webhook-signature": ours}

    assert theirs.verify(body, headers) == text
    assert theirs.sign(ID, now, body) == ours
    verify(
        [secret],
        message_id=ID,
        timestamp=str(at),
        signature=theirs.sign(ID, now, body),
        body=body.encode(),
        now=at,
    )


@pytest.mark.parametrize("text", ["MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaS", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwBr"])
def test_a_secret_may_lack_its_padding(text: str) -> None:
    padded = text + "=" * (-len(text) % 4)

    assert Secret.parse(text, bytes_min=23) == Secret.parse(f"whsec_{padded}", bytes_min=23)


@pytest.mark.parametrize(
    "text", ["", "whsec_", "whsec_!!!!", "whsec_A", "whsec_" + "QUJD" * 4, "whsec_" + "QUJD" * 22, "sécret"]
)
def test_what_is_no_secret_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(BadSecret) as refused:
        Secret.parse(text)

    assert not text.removeprefix("whsec_") or text.removeprefix("whsec_") not in str(refused.value)


def test_a_secret_shows_itself_only_when_asked() -> None:
    secret = Secret.of(b"k" * 32)

    assert Secret.parse(secret.text) == secret
    for shown in (repr(secret), str(secret), f"{secret}", f"{[secret]}"):
        assert "k" * 4 not in shown
        assert secret.text not in shown


# v1a: ed25519. The vector is that of a published implementation's tests.

SIGNING = SigningKey.parse(
    "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg=="
)
PUBLIC = PublicKey.parse("whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=")
SIGNATURE_A = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="


def check_public(signature: str, *, body: bytes = BODY) -> str:
    try:
        verify([PUBLIC], message_id=ID, timestamp=str(AT), signature=signature, body=body, now=AT)
    except BadSignature as refused:
        return refused.reason
    return ""


def test_an_ed25519_key_signs_as_published_and_its_public_half_verifies() -> None:
    assert SIGNING.public == PUBLIC
    assert sign([SIGNING], message_id=ID, timestamp=AT, body=BODY) == SIGNATURE_A
    assert check_public(SIGNATURE_A) == ""
    assert check_public(SIGNATURE_A, body=BODY + b" ") == "mismatch"


def test_several_keys_of_both_kinds_sign_side_by_side() -> None:
    both = sign([SIGNING, SECRET], message_id=ID, timestamp=AT, body=BODY)

    assert both == f"{SIGNATURE_A} {SIGNATURE}"
    assert (check(both), check_public(both)) == ("", "")


@pytest.mark.parametrize(
    "signature", [SIGNATURE_A.replace("v1a,", "v1,"), SIGNATURE, "v1a,", "v1a,AAAA", "v1a,!!", "v1a"]
)
def test_a_public_key_accepts_no_signature_of_another_version_or_form(signature: str) -> None:
    assert check_public(signature) == "mismatch"


def test_a_secret_accepts_no_ed25519_signature() -> None:
    assert check(SIGNATURE_A) == "mismatch"


def test_no_more_than_five_ed25519_candidates_are_tried() -> None:
    assert check_public(" ".join(["v1a,AAAA"] * 4 + [SIGNATURE_A])) == ""
    assert check_public(" ".join(["v1a,AAAA"] * 5 + [SIGNATURE_A])) == "mismatch"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "whsk_",
        "whsk_AAAA",
        "whsk_!!",
        PUBLIC.text,
        SIGNING.text.replace("6Xb", "7Xb"),
        SIGNING.text.removeprefix("whsk_"),
    ],
)
def test_what_is_no_signing_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(BadSecret) as refused:
        SigningKey.parse(text)

    assert text == "" or text not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "whpk_", "whpk_AAAA", "whsk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="]
)
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(BadSecret):
        PublicKey.parse(text)


def test_a_signing_key_may_be_its_seed_alone_and_shows_itself_nowhere() -> None:
    alone = SigningKey(SIGNING.seed)

    assert alone == SIGNING == signer(SIGNING.text)
    assert isinstance(signer(SECRET.text), Secret)
    assert "6Xb" not in repr(alone) + str(alone)
