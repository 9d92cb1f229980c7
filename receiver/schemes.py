"""How senders prove themselves, and how their webhooks become events: as data.

A scheme is a description that one verifier and one mapping interpret (`authenticity.py`, `mapping.py`). Presets are
rows of PRESETS; a sender's own settings are laid over its preset's. What is not understood is refused: a sender whose
row names an unknown scheme or an unknown setting proves nothing to anybody.

A *place* says where something stands in a request: `/data/id` is a JSON pointer into its body, `=/shop` is that text
itself, anything else is the name of a header. One that ends in `?` may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from contracts.errors import ContractViolation, shown
from contracts.limits import PROBLEMS_MAX, SOURCE_BYTES_MAX

PLACES_MAX: Final = 8
"""Alternatives for one attribute, or parts of a type."""
SOURCES_MAX: Final = 64
"""Sources, or origins, that one sender may have."""
TOLERANCE_SECONDS_MAX: Final = 3600
"""What is signed may be that old at most, whatever a sender's settings say."""
RATE_MAX: Final = 100_000
"""Requests of one sender, a second."""
GAP_SECONDS_MAX: Final = 3600
"""That an event may wait for the one before it, whatever a sender's settings say."""

Header = Annotated[str, StringConstraints(pattern=r"^[a-z0-9!#$&'*+.^_`|~-]{1,64}$")]
Place = Annotated[
    str, StringConstraints(pattern=r"^(/[^\x00-\x1f\x7f]*|=[!-~]+|[a-z0-9._-]+)\??$", max_length=256)
]
Label = Annotated[str, StringConstraints(pattern=r"^[ -~]*$", max_length=64)]
Places = Annotated[tuple[Place, ...], Field(max_length=PLACES_MAX)]
Texts = Annotated[
    tuple[Annotated[str, StringConstraints(min_length=1, max_length=SOURCE_BYTES_MAX)], ...],
    Field(max_length=SOURCES_MAX),
]
PLACEHOLDER: Final = re.compile(r"(\{[a-z]*\})")


class SettingsInvalid(ContractViolation):
    """A scheme or settings that nobody understands; each problem names the member."""

    code = "settings-invalid"
    http_status = 422


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Proving(Part):
    """Where a signature stands, and what it is made of.

    Several headers are names of the same thing, the first that comes counts. `layout` says how the signature stands
    in its header: `bare` behind the text `label`; in a `list` of `label,signature` between blanks; as the `fields`
    `label=signature` between commas, where `stamp` names the timestamp's. `public` is the label of ed25519 signatures
    in a list. `spelling` is how people write the secret down. `tolerance` is in seconds; none: the receiver's.
    """

    kind: Literal["hmac", "token"] = "hmac"
    header: Annotated[tuple[Header, ...], Field(min_length=1, max_length=4)]
    id: tuple[Header, ...] = ()
    timestamp: tuple[Header, ...] = ()
    layout: Literal["bare", "list", "fields"] = "bare"
    label: Label = ""
    stamp: Label = ""
    public: Label = ""
    template: Annotated[str, StringConstraints(pattern=r"^[ -~]+$", max_length=256)] = "{body}"
    digest: Literal["sha1", "sha256", "sha512"] = "sha256"
    encoding: Literal["hex", "base64", "base64url"] = "hex"
    spelling: Literal["whsec", "text", "hex", "base64"] = "text"
    tolerance: Annotated[int, Field(ge=1, le=TOLERANCE_SECONDS_MAX)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Proving:
        used = [part for part in PLACEHOLDER.split(self.template) if PLACEHOLDER.fullmatch(part)]
        if foreign := [part for part in used if part not in {"{id}", "{timestamp}", "{body}"}]:
            raise ValueError(
                f"template: expected {{id}}, {{timestamp}} and {{body}}, found {shown(foreign[0])}"
            )
        if used.count("{body}") != 1:
            raise ValueError("template: expected {body}, once")
        if "{id}" in used and not self.id:
            raise ValueError("id: expected the header of what the template has as {id}")
        if "{timestamp}" in used and not (self.timestamp or self.stamp):
            raise ValueError("timestamp: expected the header of what the template has as {timestamp}")
        if any(names and len(names) != len(self.header) for names in (self.id, self.timestamp)):
            raise ValueError("id, timestamp: expected as many headers as header has")
        if self.layout != "bare" and not self.label:
            raise ValueError(f"label: expected one, as the layout is {self.layout}")
        return self

    @property
    def signs_id(self) -> bool:
        return "{id}" in self.template

    @property
    def signs_time(self) -> bool:
        return "{timestamp}" in self.template

    def headers(self) -> tuple[str, ...]:
        return *self.header, *self.id, *self.timestamp


class Case(Part):
    """What is otherwise for some webhooks."""

    source: Places | None = None
    type: Places | None = None
    key: Places | None = None


class Rules(Part):
    """Where the attributes of an event stand in a webhook that is none.

    `type` is joined of its places, with dots; of the others the first that is there counts. `case_of` is where that
    stands which `cases` are named by. `form` is the field of an HTML form that has the JSON.
    """

    source: Places
    source_prefix: Label = ""
    id: Places
    type: Places
    type_prefix: Label = ""
    key: Places = ()
    time: Places = ()
    sequence: Places = ()
    form: Label = ""
    case_of: Place = ""
    cases: Mapping[str, Case] = {}

    def headers(self) -> tuple[str, ...]:
        """The headers that places name."""
        lists = [self.source, self.id, self.type, self.key, self.time, self.sequence, (self.case_of,)]
        lists += [each for case in self.cases.values() for each in (case.source, case.type, case.key) if each]
        names = (place.removesuffix("?") for places in lists for place in places)
        return tuple(dict.fromkeys(name for name in names if name and name[0] not in "/="))


class Challenge(Part):
    """A request whose JSON has `value` at `at` asks whether we are there; the answer is what it has at `answer`."""

    at: Place
    value: str
    answer: Place


class Ordered(Part):
    """Events reach flows in the order of their `sequence`.

    One whose predecessor is missing waits `gap` seconds for it; with 0 nobody waits. `first` is the number of the first
    event of a stream, `of` what is numbered together: all events of a source, or those of a source and a key. What
    comes after a greater one is let in as it comes, or kept `apart`, because a newer one says more.
    """

    gap: Annotated[int, Field(ge=0, le=GAP_SECONDS_MAX)] = 30
    first: Annotated[int, Field(ge=0, le=2**63)] = 1
    of: Literal["source", "key"] = "source"
    older: Literal["in", "apart"] = "in"


class Answers(Part):
    """What a sender is told by a status. `ack` is of what is stored or kept apart; `conflict` of what has the name of
    something else (none: 409, and 202 to a webhook that is no CloudEvent); `contract` of what breaks its contract.
    """

    ack: Literal[200, 202, 204] = 202
    conflict: Literal[202, 409] | None = None
    contract: Literal[202, 422] = 202


class Policy(Part):
    """All about a sender but its secrets.

    `sources` are the CloudEvents sources that it may use, `/shop/*` being all that begin so; none: any. `origins` are
    the hosts that may ask by OPTIONS whether they may post, `*.shop.example` being all below it. `rate` is in requests
    a second, `burst` how many of them may come at once. With `gzip` bodies may be compressed, and what is signed is
    the compressed form. With `once` a body counts one time, whatever unsigned headers call it. Of a `partial` batch
    what is no event is kept apart, and the others are stored. With `origin_required` a request names one of `origins`.
    """

    signature: Proving
    event: Rules | None = None
    challenge: Challenge | None = None
    sources: Texts = ()
    origins: Texts = ()
    rate: Annotated[float, Field(gt=0, le=RATE_MAX)] | None = None
    burst: Annotated[int, Field(ge=1, le=RATE_MAX)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=RATE_MAX)] | None = None
    gzip: bool = False
    once: bool = False
    ordered: Ordered | None = None
    batch: Literal["atomic", "partial"] = "atomic"
    answers: Answers = Answers()
    origin_required: bool = False


def case(key: str, **more: Any) -> dict[str, Any]:
    return {"key": [key], **more}


GITHUB: Final[Mapping[str, dict[str, Any]]] = {
    "check_run": case("/check_run/id"),
    "check_suite": case("/check_suite/id"),
    "commit_comment": case("/comment/id"),
    "content_reference": case("/content_reference/id"),
    "create": case("/ref", type=["=create", "/ref_type"]),
    "delete": case("/ref", type=["=delete", "/ref_type"]),
    "deploy_key": case("/key/id"),
    "deployment": case("/deployment/id", type=["=deployment"]),
    "deployment_status": case(
        "/deployment_status/url",
        type=["=deployment_status", "/deployment_status/state"],
        source=["/deployment/url"],
    ),
    "fork": case("/forkee/url"),
    "installation": case("/installation/id", source=["/installation/account/url"]),
    "installation_repositories": case(
        "/installation/id",
        type=["=installation_repository", "/action"],
        source=["/installation/account/url"],
    ),
    "issue_comment": case("/comment/id", source=["/issue/url"]),
    "issues": case("/issue/number", type=["=issue", "/action"]),
    "label": case("/label/name"),
    "marketplace_purchase": case("/marketplace_purchase/account/login"),
    "member": case("/member/login"),
    "membership": case("/member/login", type=["=membership", "/scope", "/action"], source=["/team/url"]),
    "meta": case("/hook_id"),
    "milestone": case("/milestone/number"),
    "org_block": case("/blocked_user/login"),
    "organization": case("/membership/user/login", source=["/organization/url"]),
    "page_build": case("/build/url"),
    "project": case("/project/id"),
    "project_card": case("/project_card/id"),
    "project_column": case("/project_column/id"),
    "public": case("/repository/name", source=["/repository/owner/url"]),
    "pull_request": case("/number"),
    "pull_request_review": case("/review/id", source=["/pull_request/url"]),
    "pull_request_review_comment": case("/comment/id", source=["/pull_request/url"]),
    "push": case("/ref"),
    "registry_package": case("/registry_package/html_url"),
    "release": case("/release/id"),
    "repository": case("/repository/name", source=["/repository/owner/url"]),
    "repository_import": case(
        "/repository/name", source=["/repository/owner/url"], type=["=repository_import"]
    ),
    "repository_vulnerability_alert": case("/alert/id"),
    "security_advisory": case("/security_advisory/ghsa_id", source=["=github.com"]),
    "status": case("/sha"),
    "team": case("/team/id"),
    "team_add": case("/team/id"),
}
"""What the CloudEvents adapter for GitHub says about each event, where that is not the rule."""

STANDARD_WEBHOOKS: Final[dict[str, Any]] = {
    "header": ["webhook-signature", "svix-signature"],
    "id": ["webhook-id", "svix-id"],
    "timestamp": ["webhook-timestamp", "svix-timestamp"],
    "layout": "list",
    "label": "v1",
    "public": "v1a",
    "template": "{id}.{timestamp}.{body}",
    "encoding": "base64",
    "spelling": "whsec",
}

PRESETS: Final[Mapping[str, dict[str, Any]]] = {
    "standard-webhooks": {"signature": STANDARD_WEBHOOKS},
    "svix": {
        "signature": STANDARD_WEBHOOKS,
        "event": {
            "source": ["=https://www.svix.com"],
            "id": ["webhook-id", "svix-id"],
            "type": ["/type"],
            "key": ["/data/id"],
            "time": ["/timestamp"],
        },
    },
    "stripe": {
        "signature": {
            "header": ["stripe-signature"],
            "layout": "fields",
            "label": "v1",
            "stamp": "t",
            "template": "{timestamp}.{body}",
        },
        "event": {
            "source": ["=https://stripe.com"],
            "id": ["/id"],
            "type": ["/type"],
            "type_prefix": "com.stripe.",
            "key": ["/data/object/id"],
            "time": ["/created"],
        },
    },
    "github": {
        "signature": {"header": ["x-hub-signature-256"], "label": "sha256="},
        "event": {
            "source": ["/repository/url", "/installation/account/url", "/organization/url", "/sender/url"],
            "id": ["x-github-delivery"],
            "type": ["x-github-event", "/action?"],
            "type_prefix": "com.github.",
            "form": "payload",
            "case_of": "x-github-event",
            "cases": GITHUB,
        },
        "once": True,
    },
    "slack": {
        "signature": {
            "header": ["x-slack-signature"],
            "timestamp": ["x-slack-request-timestamp"],
            "label": "v0=",
            "template": "v0:{timestamp}:{body}",
        },
        "event": {
            "source": ["=https://slack.com"],
            "id": ["/event_id", "/trigger_id"],
            "type": ["/event/type"],
            "type_prefix": "com.slack.",
            "key": ["/event/channel", "/event/user"],
            "time": ["/event_time"],
            "form": "payload",
            "case_of": "/type",
            "cases": {
                "block_actions": {"type": ["/type"], "key": ["/channel/id", "/user/id"]},
                "view_submission": {"type": ["/type"], "key": ["/view/id"]},
                "shortcut": {"type": ["/type"], "key": ["/user/id"]},
                "message_action": {"type": ["/type"], "key": ["/channel/id"]},
            },
        },
        "challenge": {"at": "/type", "value": "url_verification", "answer": "/challenge"},
    },
    "shopify": {
        "signature": {"header": ["x-shopify-hmac-sha256"], "encoding": "base64"},
        "event": {
            "source": ["x-shopify-shop-domain"],
            "source_prefix": "https://",
            "id": ["x-shopify-webhook-id"],
            "type": ["x-shopify-topic"],
            "type_prefix": "com.shopify.",
            "key": ["/id"],
            "time": ["x-shopify-triggered-at"],
        },
    },
    "hmac": {"signature": {"header": ["x-signature"]}, "once": True},
    "bearer": {
        "signature": {"kind": "token", "header": ["authorization"], "label": "Bearer "},
    },
}

ISSUED: Final = frozenset({"stripe", "slack", "shopify"})
"""Presets of providers that issue the secret; the others take ours."""


def policy_of(scheme: str, settings: Mapping[str, Any]) -> Policy:
    """The preset of that name with a sender's settings over it. Raises SettingsInvalid."""
    preset = PRESETS.get(scheme)
    if preset is None:
        raise SettingsInvalid(f"scheme: expected one of {', '.join(PRESETS)}, found {shown(scheme)}")
    try:
        return Policy.model_validate(laid_over(preset, settings))
    except ValidationError as error:
        lines = (
            f"{'.'.join(map(str, each['loc'])) or 'settings'}: "
            + ("there is no such setting" if each["type"] == "extra_forbidden" else each["msg"])
            for each in error.errors(include_url=False, include_input=False)
        )
        raise SettingsInvalid("; ".join(list(dict.fromkeys(lines))[:PROBLEMS_MAX])) from None


def laid_over(preset: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are laid over each other by their members; a single text counts as a list of one."""
    made = dict(preset)
    for name, value in settings.items():
        under = made.get(name)
        over = with_lists(name, cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        made[name] = {**under, **over} if isinstance(under, dict) and isinstance(over, dict) else over
    return made


def with_lists(section: str, members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_list(section, name, value) for name, value in members.items()}


LISTS: Final = {
    "signature": frozenset({"header", "id", "timestamp"}),
    "event": frozenset({"source", "id", "type", "key", "time", "sequence"}),
}


def as_list(section: str, member: str, value: Any) -> Any:
    return [value] if isinstance(value, str) and member in LISTS.get(section, ()) else value
