"""Simulated providers: what they sign is what providers sign, and they come again as those do."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from random import Random
from socket import AF_INET, SOCK_STREAM
from typing import Any, Final

import pytest
import stripe
from standardwebhooks import Webhook

from contracts.errors import BadSecret, BadSignature
from contracts.signature import PublicKey, Secret, SigningKey
from orchestrator.registry import add_sender, rotate_sender
from orchestrator.simulators import targets
from orchestrator.simulators.plan import NEAR_MAX, SPEED_MAX, Delivery, Plan, PlanInvalid, deliveries
from orchestrator.simulators.provider import provider
from orchestrator.simulators.providers import PROVIDERS
from orchestrator.simulators.signing import parse_signer, proof, signs_with_many
from orchestrator.simulators.targets import TargetRefused, host_of, is_private
from orchestrator.simulators.zoo import zoo
from receiver.authenticity import Verifier, parse_secret
from receiver.schemes import PRESETS, policy_of
from relay.addresses import AddressBlocked
from tests.habits.documents import code_in, table
from tests.receiver.world import VAULT, Connection, Pool, one, running
from tests.relay.hostile import answers, hostile

WHSEC: Final = Secret.of(b"the secret of a provider, 24 bytes and more").text
OTHER: Final = Secret.of(b"another secret of a provider, 24 bytes and more").text
TEXTS: Final = ("a secret of the provider", "another one of it")
ACME: Final = {"event": {"source": "=/acme", "id": "/id", "type": "/type", "key": "/number", "time": "/time"}}
SIGNS_TIME: Final = [scheme for scheme in PRESETS if policy_of(scheme, {}).signature.signs_time]
BODY: Final = b'{"a":1}'


def secrets_of(scheme: str) -> tuple[str, str]:
    return (WHSEC, OTHER) if policy_of(scheme, {}).signature.spelling == "whsec" else TEXTS


def settings_of(scheme: str) -> Mapping[str, Any]:
    return ACME if scheme in {"hmac", "bearer"} else {}


def test_every_scheme_has_a_provider() -> None:
    assert list(PROVIDERS) == list(PRESETS)


# ---- at the receiver ---------------------------------------------------------------------------------------------


async def test_the_receiver_takes_each_event_once_however_it_comes(pool: Pool, conn: Connection) -> None:
    """Doubled, in another order, and under two secrets."""
    async with running(pool, conn, clock=lambda: int(time.time())) as world:
        for scheme in PROVIDERS:
            old, new = secrets_of(scheme)
            form, settings = policy_of(scheme, {}).signature, settings_of(scheme)
            secret = parse_secret(form, old)
            await add_sender(conn, VAULT, name=scheme, scheme=scheme, settings=settings, secret=secret)
            await rotate_sender(conn, VAULT, scheme, text=new)
            url = f"http://127.0.0.1:{world.port}/events/default/{scheme}"
            async with provider(scheme, to=url, secret=old, seed=7) as subject:
                report = await subject.sends(8, rate=1000, duplicates=0.5, reorder=True, rotate_to=new)

            assert (report.answers, report.copies > 0) == ({"202": report.requests}, True), scheme
            assert report.all_accepted
            stored = await one(conn, "select count(*) from waypost.inbox where sender = %s", scheme)
            assert stored == 8, scheme
        assert await one(conn, "select count(*) from waypost.quarantine") == 0


async def test_the_receiver_refuses_what_a_clock_that_is_off_has_signed(pool: Pool, conn: Connection) -> None:
    async with running(pool, conn, clock=lambda: int(time.time())) as world:

        async def sends(scheme: str, skew: int) -> None:
            url = f"http://127.0.0.1:{world.port}/events/default/{scheme}"
            async with provider(scheme, to=url, secret=secrets_of(scheme)[0]) as subject:
                report = await subject.sends(skew=skew, speed=SPEED_MAX)
                well = await subject.sends(skew=skew // 2)

            assert (set(report.answers), report.all_accepted) == ({"401"}, False), scheme
            assert (well.answers, well.all_accepted) == ({"202": 1}, True), scheme

        for scheme in SIGNS_TIME:
            secret = parse_secret(policy_of(scheme, {}).signature, secrets_of(scheme)[0])
            await add_sender(conn, VAULT, name=scheme, scheme=scheme, secret=secret)
        await asyncio.gather(*(sends(scheme, skew) for scheme in SIGNS_TIME for skew in (400, -400)))


# ---- signatures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "secret", "body", "header", "wanted"),
    [
        (
            "standard-webhooks",
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            b'{"test": 2432232314}',
            "webhook-signature",
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
        (
            "svix",
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            b'{"test": 2432232314}',
            "svix-signature",
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
        (
            "standard-webhooks",
            "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==",
            b'{"test": 2432232314}',
            "webhook-signature",
            "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg==",
        ),
        (
            "github",
            "It's a Secret to Everybody",
            b"Hello, World!",
            "x-hub-signature-256",
            "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
        ),
        ("shopify", "hush", BODY, "x-shopify-hmac-sha256", "3+Yq/TpwjqJ7IXuMq8EfED7b+y0XbokqOKLUdagDxMI="),
        ("bearer", "hush", BODY, "authorization", "Bearer hush"),
    ],
    ids=["standard-webhooks", "svix", "v1a", "github", "shopify", "bearer"],
)
def test_a_signature_is_that_of_the_published_vector(
    scheme: str, secret: str, body: bytes, header: str, wanted: str
) -> None:
    form = policy_of(scheme, {}).signature

    made = proof(
        form,
        [parse_signer(form, secret)],
        message_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        timestamp=1614265330,
        body=body,
        spelling=PROVIDERS[scheme].spelling,
    )

    assert made[header] == wanted


def test_others_libraries_verify_what_is_signed() -> None:
    now, body = int(time.time()), '{"name": "Zoë €"}'
    form = policy_of("stripe", {}).signature
    keys = [parse_signer(form, "whsec_new"), parse_signer(form, "whsec_old")]
    header = proof(form, keys, message_id="", timestamp=now, body=body.encode())["stripe-signature"]
    for secret in ("whsec_new", "whsec_old"):
        stripe.WebhookSignature.verify_header(body, header, secret, 300)  # pyright: ignore[reportUnknownMemberType]  # theirs is untyped in part

    form = policy_of("standard-webhooks", {}).signature
    keys = [parse_signer(form, OTHER), parse_signer(form, WHSEC)]
    headers = proof(form, keys, message_id="msg_1", timestamp=now, body=body.encode())
    for secret in (OTHER, WHSEC):
        Webhook(secret).verify(body, headers)


GENERIC: Final[list[dict[str, Any]]] = [
    {"digest": digest, "encoding": encoding, "label": "sha=", "template": "<{body}>"}
    for digest in ("sha1", "sha256", "sha512")
    for encoding in ("hex", "base64", "base64url")
] + [
    {"template": "{timestamp}.{id}.{body}.{id}", "id": "x-id", "timestamp": "x-time"},
    {"layout": "list", "label": "v9", "encoding": "base64"},
    {"layout": "fields", "label": "s", "stamp": "t", "template": "v0:{timestamp}:{body}"},
    {"layout": "fields", "label": "s"},
    {"spelling": "hex"},
    {"kind": "token", "label": "Token "},
]


@pytest.mark.parametrize("settings", GENERIC, ids=[json.dumps(it) for it in GENERIC])
def test_whatever_a_sender_s_settings_say_is_signed_as_it_is_verified(settings: dict[str, Any]) -> None:
    form = policy_of("hmac", {"signature": settings}).signature
    secrets = ["ab12", "cd34"]
    keys = [parse_signer(form, text) for text in (secrets if signs_with_many(form) else secrets[:1])]
    headers = proof(form, keys, message_id="msg_1", timestamp=1000, body=BODY)
    for text in secrets[: len(keys)]:
        verifier = Verifier(form, [parse_secret(form, text)])
        verifier.verify(verifier.proof(headers), BODY, now=1000)

    other = Verifier(form, [parse_secret(form, "ef56")])
    with pytest.raises(BadSignature, match="mismatch"):
        other.verify(other.proof(headers), BODY, now=1000)


def test_a_private_key_signs_what_its_public_half_verifies_and_a_public_one_signs_nothing() -> None:
    form, key = policy_of("standard-webhooks", {}).signature, SigningKey(bytes(range(32)))
    headers = proof(form, [key], message_id="msg_1", timestamp=1000, body=BODY)
    verifier = Verifier(form, [PublicKey.parse(key.public.text)])

    verifier.verify(verifier.proof(headers), BODY, now=1000)

    with pytest.raises(BadSecret, match="expected one that signs, found a public key"):
        parse_signer(form, key.public.text)


async def test_the_middle_of_a_rotation_is_signed_by_both_where_a_header_has_room() -> None:
    old, new = Secret.parse(WHSEC), Secret.parse(OTHER)
    async with zoo(secrets=[old]) as of_old, zoo(secrets=[new]) as of_new:
        for here in (of_old, of_new):
            async with provider("standard-webhooks", to=here.at("ok"), secret=WHSEC) as subject:
                await subject.sends(8, rate=1000, rotate_to=OTHER)
                await subject.sends(1)

        assert [seen.signature for seen in of_old.seen] == ["verified"] * 6 + ["mismatch"] * 3
        assert [seen.signature for seen in of_new.seen] == ["mismatch"] * 4 + ["verified"] * 5


# ---- when they come again ----------------------------------------------------------------------------------------


async def test_each_comes_as_often_as_the_page_says_and_under_one_identity() -> None:
    rows = table("docs/testing.md", "provider")

    async def comes(row: list[str]) -> None:
        [scheme] = code_in(row[0])
        async with (
            zoo() as here,
            provider(scheme, to=here.at("status/500"), secret=secrets_of(scheme)[0]) as subject,
        ):
            report = await subject.sends(speed=SPEED_MAX)

            assert (report.requests, report.accepted) == (int(row[1]), 0), scheme
            assert len({seen.request.body for seen in here.seen}) == 1
        assert float(row[3].removesuffix(" s")) == PROVIDERS[scheme].waits

    assert [code_in(row[0])[0] for row in rows] == list(PROVIDERS)
    await asyncio.gather(*map(comes, rows))


def waits(scheme: str) -> list[float]:
    """The waits of a schedule without its jitter, in seconds."""
    schedule, found, age = PROVIDERS[scheme].schedule, list[float](), 0.0
    while schedule is not None:
        wait = schedule.after(len(found) + 1, age=timedelta(seconds=age))
        if wait is None:
            break
        found.append(wait.total_seconds())
        age += found[-1]
    return found


def test_the_clocks_are_those_that_providers_document() -> None:
    minute, hour = 60, 3600
    assert waits("svix") == [5, 5 * minute, 30 * minute, 2 * hour, 5 * hour, 10 * hour, 10 * hour]
    assert waits("slack") == [1, minute, 5 * minute]
    assert (len(waits("shopify")), sum(waits("shopify"))) == (8, 4 * hour)
    assert 2 * 24 * hour < sum(waits("stripe")) <= 3 * 24 * hour
    assert waits("github") == []


async def test_a_speed_is_how_much_sooner_it_comes_again() -> None:
    heard: list[float] = []
    async with (
        hostile(answers(500)) as server,
        provider("slack", to=server.url, secret="hush") as subject,
    ):
        await subject.sends(speed=10_000, told=lambda _, seconds: heard.append(seconds))

        assert heard == pytest.approx([1 / 10_000, 60 / 10_000, 300 / 10_000])
        numbers = [request.headers.get("x-slack-retry-num") for request in server.requests]
        assert numbers == [None, "1", "2", "3"]


@pytest.mark.parametrize(
    ("scheme", "status", "header", "requests"),
    [
        ("slack", 500, "X-Slack-No-Retry: 1", 1),
        ("svix", 500, "webhook-delivery: abort-message", 1),
        ("svix", 410, "X: y", 1),
        ("slack", 410, "X: y", 4),
    ],
)
async def test_what_ends_it_for_a_provider_ends_it(
    scheme: str, status: int, header: str, requests: int
) -> None:
    async with (
        hostile(answers(status, header)) as server,
        provider(scheme, to=server.url, secret=secrets_of(scheme)[0]) as subject,
    ):
        report = await subject.sends(speed=SPEED_MAX)

    assert (report.requests, report.answers) == (requests, {str(status): requests})


async def test_what_an_endpoint_does_wrong_is_an_answer_and_no_redirect_is_followed() -> None:
    async with zoo() as here:
        found: dict[str, str] = {}
        for behaviour in ("flood", "reset", "duplicate-length", "redirect", "flaky?fail=1"):
            async with provider("github", to=here.at(behaviour), secret="hush") as subject:
                report = await subject.sends()
                found[behaviour] = report.deliveries[0].last

        assert [seen.path for seen in here.seen] == [
            *("/flood", "/reset", "/duplicate-length", "/redirect", "/flaky"),
        ]
    assert found == {
        "flood": "200",
        "reset": "connection-cut",
        "duplicate-length": "protocol-error",
        "redirect": "307",
        "flaky?fail=1": "503",
    }


async def test_what_is_sent_later_is_other_events() -> None:
    async with zoo() as here, provider("hmac", to=here.at("ok"), secret="hush", seed=7) as subject:
        reports = [await subject.sends(2), await subject.sends(2)]

    sent = [it for report in reports for it in report.deliveries]
    assert [json.loads(it.body)["number"] for it in sent] == [1, 2, 3, 4]
    assert len({it.id for it in sent}) == 4


async def test_who_is_asked_to_stop_says_what_was_not_sent() -> None:
    stop = asyncio.Event()
    stop.set()
    async with zoo() as here, provider("slack", to=here.at("ok"), secret="hush") as subject:
        report = await subject.sends(3, stop=stop)

        assert (report.stopped, report.requests, report.all_accepted, here.seen) == (True, 0, False, [])


# ---- what is sent ------------------------------------------------------------------------------------------------


def planned(scheme: str = "stripe", seed: int = 7, **how: Any) -> list[Delivery]:
    return deliveries(PROVIDERS[scheme], Plan(**how), Random(seed))


@pytest.mark.parametrize("scheme", [*PROVIDERS])
def test_one_seed_makes_the_same_to_the_byte_and_another_one_does_not(scheme: str) -> None:
    how: dict[str, Any] = {"count": 20, "duplicates": 0.5, "reorder": True}

    once, again, other = planned(scheme, **how), planned(scheme, **how), planned(scheme, seed=8, **how)

    assert once == again
    assert not {it.id for it in once} & {it.id for it in other}
    assert json.loads(once[0].body)


@pytest.mark.parametrize("scheme", [name for name, preset in PRESETS.items() if preset.get("once")])
def test_what_counts_once_by_its_body_has_another_body_in_each_run(scheme: str) -> None:
    once, other = planned(scheme, count=3), planned(scheme, count=3, seed=8)

    assert not {it.body for it in once} & {it.body for it in other}


def test_copies_come_behind_what_they_copy_and_events_near_their_place() -> None:
    made = planned(count=200, duplicates=0.5, reorder=True)
    events = [it.number for it in made if not it.is_copy]

    assert events != sorted(events)
    assert all(abs(place - number) <= NEAR_MAX for place, number in enumerate(events, 1))
    assert sorted(events) == list(range(1, 201))
    assert 60 < len(made) - len(events) < 140
    seen: dict[str, bytes] = {}
    for it in made:
        assert it.is_copy == (it.id in seen)
        assert seen.setdefault(it.id, it.body) == it.body


def test_a_run_of_large_events_keeps_one_body_in_memory() -> None:
    tracemalloc.start()
    made = planned("github", count=200, body='"' + "${id}" * 50_000 + '"')
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(made) == 200
    assert peak < 20 * len(made[0].body)


def test_a_body_and_a_type_of_one_s_own_are_sent() -> None:
    [it] = planned("github", type="push", body='{"n": ${number}, "price": "$5", "of": "${type}/${time}"}')

    assert it.body == b'{"n": 1, "price": "$5", "of": "push/2026-01-01T00:00:01Z"}'
    assert it.headers["x-github-event"] == "push"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"count": 0}, "count: expected 1 to 10000, found 0"),
        ({"count": 10_001}, "count: expected 1 to 10000, found 10001"),
        ({"rate": float("nan")}, "rate: expected more than 0, at most 1000 a second, found nan"),
        ({"duplicates": 1.5}, "duplicates: expected 0 to 1, found 1.5"),
        ({"speed": 0.0}, "speed: expected more than 0, at most 1000000, found 0.0"),
        ({"skew": -86_401}, "skew: expected at most 86400 seconds, found -86401"),
        ({"type": "a\r\nX: b"}, "type: expected at most 128 letters, .*, found 'a.r.nX: b'"),
        ({"body": "x" * 262_145}, "body: expected at most 262144 bytes, found 262145"),
        ({"body": "${nme}"}, "body: expected .*number.*, found '..nme.'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(how: dict[str, Any], expected: str) -> None:
    with pytest.raises(PlanInvalid, match=expected):
        planned(**how)


@pytest.mark.parametrize("scheme", sorted(set(PRESETS) - set(SIGNS_TIME)))
async def test_a_clock_cannot_be_off_where_no_time_is_signed(scheme: str) -> None:
    async with provider(scheme, to="http://127.0.0.1:8080/", secret="hush") as subject:
        with pytest.raises(PlanInvalid, match=f"expected none, as {scheme} signs no time, found 5"):
            await subject.sends(skew=5)


# ---- whom they may post to ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ftp://127.0.0.1/", "expected http://HOST or https://HOST"),
        ("http:///hook", "expected http://HOST or https://HOST"),
        ("http://127.0.0.1:5432/", "expected another port than 5432"),
        ("http://127.0.0.1:0/", "expected another port than 0"),
        ("http://127.0.0.1:99999/", "expected a URL"),
        ("http://ada:hush@127.0.0.1/", "expected no user name or password"),
        ("http://127.0.0.1/\x1b", "expected a URL of at most 2048 plain characters"),
        ("http://127.0.0.1/" + "x" * 2048, "expected a URL of at most 2048 plain characters"),
    ],
)
def test_a_url_that_nobody_should_post_to_is_refused(url: str, expected: str) -> None:
    with pytest.raises(TargetRefused, match=expected) as refused:
        host_of(url)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "allowed", "expected"),
    [
        (
            "http://8.8.8.8/",
            (),
            "expected this machine or a private network, found '8.8.8.8'; .* --allow-host",
        ),
        ("http://8.8.8.8/", ("example.com",), "expected this machine or a private network"),
        ("http://169.254.169.254/", (), "expected this machine or a private network"),
        ("http://169.254.169.254/", ("169.254.169.254",), "is closed, whoever allows it"),
        ("http://[::ffff:8.8.8.8]/", (), "expected this machine or a private network"),
        ("http://nowhere.invalid/", (), "expected a host that is known here"),
    ],
)
async def test_elsewhere_is_only_where_it_is_allowed(
    url: str, allowed: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(TargetRefused, match=expected):
        await targets.check(url, allowed)


@pytest.mark.parametrize(
    ("address", "private"),
    [("127.0.0.1", True), ("::1", True), ("10.1.2.3", True), ("192.168.1.1", True), ("fd00::1", True)]
    + [(it, False) for it in ("8.8.8.8", "169.254.1.1", "0.0.0.0", "100.64.0.1", "fe80::1", "172.32.0.1")],
)
async def test_here_is_this_machine_and_private_networks(address: str, private: bool) -> None:
    assert is_private(address) is private
    shown = f"[{address}]" if ip_address(address).version == 6 else address
    if private:
        await targets.check(f"http://{shown}:8080/", ())


def test_a_name_that_leads_elsewhere_at_the_last_moment_is_no_way_around() -> None:
    def dial(address: str, allowed: tuple[str, ...]) -> None:
        make = targets.sockets("hooks.example", allowed)
        make((AF_INET, SOCK_STREAM, 0, "", (address, 80))).close()

    dial("127.0.0.1", ())
    dial("8.8.8.8", ("HOOKS.example",))
    for address, allowed in (
        ("8.8.8.8", ()),
        ("169.254.169.254", ()),
        ("169.254.169.254", ("hooks.example",)),
    ):
        with pytest.raises(AddressBlocked):
            dial(address, allowed)
