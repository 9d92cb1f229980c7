"""What the environment says about a process, read once, checked as a whole.

Every name may also be given as `<NAME>_FILE`, a file that holds the value: for secrets that must not stand in
an environment. All faults are told at once, each with its name, what is expected and what was found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from contracts import codec
from contracts.envelope import URI_REFERENCE
from contracts.errors import BadSecret, WaypostError, shown
from contracts.limits import SOURCE_BYTES_MAX
from contracts.objects import ObjectStore
from contracts.vault import Vault
from orchestrator.objects.files import FileStore

T = TypeVar("T")
Network = IPv4Network | IPv6Network

LEASE: Final = timedelta(seconds=30)
LEASE_MIN: Final = timedelta(seconds=1)
LEASE_MAX: Final = timedelta(minutes=10)
HEALTH_PORTS: Final = ("worker", "relay", "receiver", "tasks")
"""Who takes the first health port, the next and those after, so that all can run on one machine."""
BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
SEGMENT_GAP_MIN: Final = timedelta(seconds=1)
ROLE_BYTES_MAX: Final = 63  # of a name in PostgreSQL
FILE_BYTES_MAX: Final = 64 * 1024  # of a <NAME>_FILE
EXECUTION_PART_BYTES: Final = len("/executions/") + 36  # what is appended to the source


class SettingsInvalid(WaypostError):
    """The environment is not as it must be; each problem is a sentence about one name."""

    code = "settings-invalid"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("settings: " + "; ".join(problems))
        self.problems = tuple(problems)


class Address(NamedTuple):
    """Where a process listens."""

    host: str
    port: int
    """0: any that is free."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


SPAN: Final = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
UNITS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def span(text: str) -> timedelta:
    """A duration as people write it: 500ms, 30s, 5m, 1h, 7d. Raises ValueError."""
    parts = SPAN.fullmatch(text)
    if parts is None:
        raise ValueError(f"expected a duration such as 500ms, 30s, 5m, 2h or 7d, found {shown(text)}")
    return timedelta(milliseconds=int(parts[1]) * UNITS[parts[2]])


def lease_of(text: str) -> timedelta:
    if not LEASE_MIN <= (found := span(text)) <= LEASE_MAX:
        raise ValueError(f"expected 1s to 10m, found {shown(text)}")
    return found


def changed_of(text: str) -> str:
    if text not in ("refuse", "accept"):
        raise ValueError(f"expected refuse or accept, found {shown(text)}")
    return text


def gap_of(text: str) -> timedelta:
    if not (found := span(text)) >= SEGMENT_GAP_MIN:
        raise ValueError(f"expected 1s or more, found {shown(text)}")
    return found


def address_of(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"expected HOST:PORT such as 127.0.0.1:8081, found {shown(text)}")
    return Address(host, int(port))


def address_or_off(text: str) -> Address | None:
    """`off` for nowhere."""
    return None if text == "off" else address_of(text)


def networks_of(text: str) -> tuple[Network, ...]:
    try:
        return tuple(ip_network(part) for part in parts_of(text))
    except ValueError as error:
        raise ValueError(f"expected networks such as 10.0.0.0/8,::1/128, found {shown(text)}") from error


def modules_of(text: str) -> tuple[str, ...]:
    found = parts_of(text)
    if not all(part.isidentifier() for name in found for part in name.split(".")):
        raise ValueError(f"expected modules such as shop.flows,shop.more (no paths), found {shown(text)}")
    return found


def parts_of(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def role_of(text: str) -> str:
    if not text.isprintable() or text.lower() == "none" or len(text.encode()) > ROLE_BYTES_MAX:
        raise ValueError(f"expected a role of the database, found {shown(text)}")
    return text


def url_of(text: str) -> str:
    """An http or https URL without credentials, query and fragment; its last slash is dropped."""
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits, parts = False, urlsplit("")
    if not fits or "@" in parts.netloc or parts.query or parts.fragment or not text.isprintable():
        raise ValueError(f"expected a URL such as https://waypost.example, found {shown(text)}")
    return text.rstrip("/")


def source_of(text: str) -> str:
    found = text.rstrip("/")
    if not found or not URI_REFERENCE.fullmatch(found):
        raise ValueError(f"expected a URI reference such as /waypost, found {shown(text)}")
    if len(found.encode()) > SOURCE_BYTES_MAX - EXECUTION_PART_BYTES:
        raise ValueError(f"expected at most {SOURCE_BYTES_MAX - EXECUTION_PART_BYTES} bytes")
    return found


def dsn_of(text: str) -> SecretStr:
    """Never repeats what it found: a DSN holds a password."""
    if not (text.startswith(("postgresql://", "postgres://")) or "=" in text):
        raise ValueError("expected postgresql://USER:PASSWORD@HOST/DATABASE, found something else")
    return SecretStr(text)


def key_of(text: str) -> SecretStr:
    try:
        Vault.from_text(text)
    except BadSecret:
        raise ValueError("expected 32 bytes as base64, found something else") from None
    return SecretStr(text)


def payload_keys_of(text: str) -> SecretStr:
    codec.keys_of(text)
    return SecretStr(text)


def payload_store_of(text: str) -> str:
    """`file:///FOLDER` or `s3://BUCKET/PREFIX`. What is neither is not repeated: a secret may stand in it."""
    try:
        found = urlsplit(text)
    except ValueError:
        found = urlsplit("")
    path = unquote(found.path)
    if found.scheme == "file":
        fits = not found.netloc and path not in ("", "/")
    else:
        fits = found.scheme == "s3" and BUCKET.fullmatch(found.netloc) is not None
    if not fits or found.query or found.fragment or ".." in path.split("/") or not path.isprintable():
        raise ValueError("expected file:///FOLDER or s3://BUCKET/PREFIX, found something else")
    return text


def read(parse: Callable[[str], T]) -> BeforeValidator:
    def reader(value: Any) -> Any:
        return parse(value) if isinstance(value, str) else value

    return BeforeValidator(reader)


class Settings(BaseModel):
    """Everything that may be configured. The alias of a field is its name in the environment."""

    model_config = ConfigDict(
        frozen=True, arbitrary_types_allowed=True, populate_by_name=True, extra="ignore"
    )

    database_url: Annotated[SecretStr | None, read(dsn_of)] = Field(
        default=None, alias="WAYPOST_DATABASE_URL"
    )
    """None: `demo` and `dev` start a database of their own; everything else needs one."""
    listen_url: Annotated[SecretStr | None, read(dsn_of)] = Field(default=None, alias="WAYPOST_LISTEN_URL")
    """A direct DSN for LISTEN, when the other goes through a pooler. None: the same."""
    secret_key: Annotated[SecretStr | None, read(key_of)] = Field(default=None, alias="WAYPOST_SECRET_KEY")
    payload_keys: Annotated[SecretStr | None, read(payload_keys_of)] = Field(
        default=None, alias="WAYPOST_PAYLOAD_KEYS"
    )
    """What seals payloads: `ID:KEY,ID:KEY`, the newest first. None: they are in the clear."""
    payload_store: Annotated[str | None, read(payload_store_of)] = Field(
        default=None, alias="WAYPOST_PAYLOAD_STORE"
    )
    """Where payloads are that are too large for a row. None: nowhere, so they are refused."""
    flows: Annotated[tuple[str, ...], read(modules_of)] = Field(default=(), alias="WAYPOST_FLOWS")
    changed_flows: Annotated[Literal["refuse", "accept"], read(changed_of)] = Field(
        default="refuse", alias="WAYPOST_CHANGED_FLOWS"
    )
    """Whether a worker starts when a version of a flow has other code than it had."""
    application_role: Annotated[str | None, read(role_of)] = Field(
        default=None, alias="WAYPOST_APPLICATION_ROLE"
    )
    """Who the functions of transactions are in the database. None: Waypost itself."""
    lease: Annotated[timedelta, read(lease_of)] = Field(default=LEASE, alias="WAYPOST_LEASE")
    """How long a worker may be silent before others take its executions over."""
    allow_addresses: Annotated[tuple[Network, ...], read(networks_of)] = Field(
        default=(), alias="WAYPOST_ALLOW_ADDRESSES"
    )
    """Networks that the relay may reach although they are private."""
    data_dir: Path = Field(default=Path(".waypost"), alias="WAYPOST_DATA_DIR")
    dev: Path | None = Field(default=None, alias="WAYPOST_DEV")
    """The folder of the `dev` or `demo` whose environment file this shell has read."""
    source: Annotated[str, read(source_of)] = Field(default="/waypost", alias="WAYPOST_SOURCE")
    receiver_url: Annotated[str, read(url_of)] = Field(
        default="http://127.0.0.1:8081", alias="WAYPOST_RECEIVER_URL"
    )
    """As services reach it; becomes `replyto`."""
    receiver_addr: Annotated[Address, read(address_of)] = Field(
        default=Address("127.0.0.1", 8081), alias="WAYPOST_RECEIVER_ADDR"
    )
    api_addr: Annotated[Address, read(address_of)] = Field(
        default=Address("127.0.0.1", 8080), alias="WAYPOST_API_ADDR"
    )
    health_addr: Annotated[Address | None, read(address_or_off)] = Field(
        default=Address("127.0.0.1", 8082), alias="WAYPOST_HEALTH_ADDR"
    )
    """Of a worker. Without it a relay and a receiver take the ports that follow. None: nobody is told."""

    trace_segment_gap: Annotated[timedelta | None, read(gap_of)] = Field(
        default=None, alias="WAYPOST_TRACE_SEGMENT_GAP"
    )
    """After a longer pause an execution goes on in another trace. None: it has one."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Raises SettingsInvalid with every fault. An empty value counts as none."""
        found: dict[str, str] = {}
        problems: list[str] = []
        for name in names():
            try:
                value = value_of(name, environment)
            except ValueError as error:
                problems.append(f"{name}: {error}")
                continue
            if value:
                found[name] = value
        try:
            settings = cls.model_validate(found)
        except ValidationError as error:
            problems += [f"{it['loc'][0]}: {reason(it['msg'])}" for it in error.errors(include_input=False)]
            raise SettingsInvalid(sorted(problems)) from None
        if problems:
            raise SettingsInvalid(problems)
        return settings

    def without_dev(self) -> Settings:
        """These settings without what the environment file of a `dev` or `demo` said: that database is not ours."""
        if self.dev is None:
            return self
        return self.model_copy(
            update={"database_url": None, "secret_key": None, "lease": LEASE, "allow_addresses": ()}
        )

    def dsn(self) -> str:
        """Raises SettingsInvalid when there is none."""
        if self.database_url is None:
            raise SettingsInvalid(
                ["WAYPOST_DATABASE_URL: expected postgresql://USER:PASSWORD@HOST/DATABASE, found none"]
            )
        return self.database_url.get_secret_value()

    def listen_dsn(self) -> str:
        return self.dsn() if self.listen_url is None else self.listen_url.get_secret_value()

    def health_of(self, part: str) -> tuple[Address | None, bool]:
        """Where `part` says how it is, and whether it must be there: the environment says so, and is right."""
        address = self.health_addr
        if "health_addr" in self.model_fields_set or address is None:
            return address, True
        return Address(address.host, address.port + HEALTH_PORTS.index(part)), False

    def codec(self) -> codec.Codec | None:
        """None: payloads are in the clear."""
        if self.payload_keys is None:
            return None
        return codec.Codec(codec.keys_of(self.payload_keys.get_secret_value()), os.urandom)

    def objects(self) -> ObjectStore | None:
        """None: there is no payload store. Raises SettingsInvalid when what it needs is not installed."""
        if self.payload_store is None:
            return None
        found = urlsplit(self.payload_store)
        path = unquote(found.path)
        if found.scheme == "file":
            return FileStore(Path(path))
        try:
            from orchestrator.objects.buckets import BucketStore  # noqa: PLC0415  # an extra
        except ImportError:
            missing = (
                "WAYPOST_PAYLOAD_STORE: expected waypost[s3] to be installed for s3://, found it missing"
            )
            raise SettingsInvalid([missing]) from None
        return BucketStore(found.netloc, path.strip("/"))

    def vault(self) -> Vault:
        """Raises SettingsInvalid when there is no key."""
        if self.secret_key is None:
            hint = "`openssl rand -base64 32` makes one"
            raise SettingsInvalid([f"WAYPOST_SECRET_KEY: expected 32 bytes as base64, found none; {hint}"])
        return Vault.from_text(self.secret_key.get_secret_value())


def names() -> list[str]:
    """The names in the environment, without their _FILE twins."""
    return [field.alias for field in Settings.model_fields.values() if field.alias is not None]


def value_of(name: str, environment: Mapping[str, str]) -> str:
    """What `name` or its _FILE twin says. Raises ValueError when both do, or the file cannot be read."""
    said, path = environment.get(name, ""), environment.get(f"{name}_FILE", "")
    if not path:
        return said
    if said:
        raise ValueError(f"expected a value here or in {name}_FILE, found both")
    try:
        with Path(path).open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ValueError(
                f"expected a file of at most {FILE_BYTES_MAX} bytes, found more in {shown(path)}"
            )
        return text.decode().strip()
    except OSError as error:
        raise ValueError(f"expected a readable file, found {shown(path)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text, found something else in {shown(path)}") from error


def reason(message: str) -> str:
    return message.removeprefix("Value error, ")
