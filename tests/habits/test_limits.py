"""Everything has a limit, and docs/limits.md lists every one of them, with the value that it has in the code."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any, Final, cast

import pytest

from orchestrator.core.retry import Retry
from orchestrator.task_worker import TaskLimits
from orchestrator.worker import WorkerLimits
from receiver.settings import ReceiverSettings
from relay.settings import RelaySettings
from tests.cli.processes import ROOT
from tests.habits.documents import cells_of, code_in, text_of

PAGE: Final = "docs/limits.md"
FOLDERS: Final = ("contracts", "migrations", "relay", "receiver", "orchestrator")
SETTINGS: Final = {
    "relay/settings.py": RelaySettings(),
    "receiver/settings.py": ReceiverSettings(),
    "orchestrator/worker.py": WorkerLimits(),
    "orchestrator/task_worker.py": TaskLimits(),
}
NAMED_LIKE_A_LIMIT: Final = re.compile(r"_(MAX|MIN|BYTES|SECONDS|TRIES|CONNECTIONS|SCHEDULE)(_|$)")
IN_BYTES: Final = frozenset({"response_max"})
"""Settings that count bytes without saying so in their name."""

NO_LIMITS: Final = {
    "contracts/vault.py": {"KEY_BYTES", "NONCE_BYTES"},  # sizes that AES-GCM has
    "orchestrator/registry.py": {"SECRET_BYTES", "KEY_ID_BYTES"},  # sizes of what we draw
    "orchestrator/settings.py": {"EXECUTION_PART_BYTES"},  # the length of a text that is appended
    "orchestrator/engine/parking.py": {
        "BASE_BYTES",
        "FACT_BYTES",
    },  # estimates, which parked_bytes_max bounds
    "relay/settings.py": {"allow"},  # a list of networks
}

# ---- the code --------------------------------------------------------------------------------------------------


def limits_of_the_code() -> dict[tuple[str, str], str]:
    """The value, as the page should have it, of each limit by its file and its name."""
    found: dict[tuple[str, str], str] = {}
    for path, name, value in [*constants(), *settings()]:
        if name not in NO_LIMITS.get(path, ()):
            found[path, name] = written(name, value)
    return found


def constants() -> Iterator[tuple[str, str, Any]]:
    """All of contracts/limits.py, and of each other file what is named like a limit or is a span of time."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            for name in constants_in(file.read_text(encoding="utf-8")):
                value = getattr(importlib.import_module(module_of(path)), name)
                if path == "contracts/limits.py" or is_limit(name, value):
                    yield path, name, value


def constants_in(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]) if (
                name.isupper()
            ):
                yield name
            case _:
                continue


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_limit(name: str, value: object) -> bool:
    return isinstance(value, timedelta | Retry) or NAMED_LIKE_A_LIMIT.search(name) is not None


def settings() -> Iterator[tuple[str, str, Any]]:
    for path, chosen in SETTINGS.items():
        for field in fields(chosen):
            yield path, field.name, getattr(chosen, field.name)


def written(name: str, value: Any) -> str:
    """A value with its unit."""
    match value:
        case tuple():
            return ", ".join(map(str, cast("tuple[int, ...]", value))) + " s"
        case Retry(attempts=1):
            return "1 try"
        case Retry():
            return f"{value.attempts} tries, {span(value.first)} to {span(value.cap)}"
        case timedelta():
            return span(value)
        case int() | float():
            return counted(name.lower(), value)
        case _:
            return str(value)


def counted(name: str, value: float) -> str:
    if "bytes" in name or name in IN_BYTES:
        return size(int(value))
    return span(timedelta(seconds=value)) if "seconds" in name else f"{value:,}"


def size(count: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor and count % factor == 0:
            return f"{count // factor:,} {unit}"
    return f"{count:,} bytes"


def span(found: timedelta) -> str:
    milliseconds = found // timedelta(milliseconds=1)
    for unit, length in (("days", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds >= length and milliseconds % length == 0:
            count = milliseconds // length
            return "1 day" if (unit, count) == ("days", 1) else f"{count:,} {unit}"
    return f"{milliseconds:,} ms"


# ---- the page --------------------------------------------------------------------------------------------------


def limits_of_the_page() -> dict[tuple[str, str], str]:
    """The value in each row by file and name: the heading says the file, or the folder that names begin in."""
    found: dict[tuple[str, str], str] = {}
    place = ""
    for line in text_of(PAGE).splitlines():
        if line.startswith("#"):
            place = next(iter(code_in(line)), "")
        elif line.startswith("| `") and place:
            names, value, _ = cells_of(line)
            found |= {file_and_name(place, name): value for name in code_in(names)}
    return found


def file_and_name(place: str, name: str) -> tuple[str, str]:
    if place.endswith(".py"):
        return place, name
    file, _, name = name.rpartition(".")
    return f"{place}{file}.py", name


def test_every_limit_is_listed_with_its_value() -> None:
    listed, there = limits_of_the_page(), limits_of_the_code()

    missing = [
        f"{path}: {name}, {value}" for (path, name), value in there.items() if (path, name) not in listed
    ]
    wrong = [
        f"{path}: {name} is {there[path, name]}"
        for path, name in there
        if listed.get((path, name)) not in {None, there[path, name]}
    ]
    gone = [f"{path}: {name}" for path, name in listed if (path, name) not in there]

    assert (missing, wrong, gone) == ([], [], [])


def test_what_is_reached_is_said_for_every_limit() -> None:
    rows = [cells_of(line) for line in text_of(PAGE).splitlines() if line.startswith("| `")]

    assert len(rows) > 100
    assert [row[0] for row in rows if not row[-1]] == []


# ---- the tables ------------------------------------------------------------------------------------------------


def test_the_bounds_of_the_tables_are_listed() -> None:
    listed = {
        code_in(cells[0])[0]: cells[1]
        for cells in map(cells_of, text_of(PAGE).partition("## The tables")[2].splitlines())
        if cells[0].startswith("`")
    }

    assert listed == dict(bounds())


def bounds() -> Iterator[tuple[str, str]]:
    """How many bytes of each column a table takes, as its constraints have it."""
    scripts = sorted(path.name for path in (ROOT / "migrations").glob("*.sql"))
    schema = "\n".join(text_of(f"migrations/{name}") for name in scripts)
    for name, body in re.findall(r"create table waypost\.(\w+) \((.*?)\n\)", schema, re.DOTALL):
        found: list[tuple[str, int]] = []
        for column, condition in re.findall(r"octet_length\((\w+)\)\s+(between \d+ and \d+|<= \d+)", body):
            found.append((column, int(re.findall(r"\d+", condition)[-1])))
        if found:
            yield name, ", ".join(f"{column} {count:,}" for column, count in found)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("A_MAX", 25_000, "25,000"),
        ("A_BYTES_MAX", 262_144, "256 KiB"),
        ("A_BYTES_MAX", 8190, "8,190 bytes"),
        ("A_SECONDS", 0.5, "500 ms"),
        ("A", timedelta(days=1), "1 day"),
        ("A", timedelta(seconds=90), "90 s"),
        ("A", timedelta(seconds=300), "5 min"),
        ("A", Retry(), "5 tries, 1 s to 5 min"),
        ("A_SCHEDULE", (1, 2), "1, 2 s"),
        ("A_MAX", "2 s", "2 s"),
    ],
)
def test_a_value_is_written_with_its_unit(name: str, value: object, text: str) -> None:
    assert written(name, value) == text
