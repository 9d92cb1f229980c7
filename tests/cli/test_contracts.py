"""`waypost contracts`: prints, writes, and says what is not up to date. It needs no database."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import RunIn, Said

SHOP = "examples.shop.contracts"
FILES = [
    f"{name}.contract.json"
    for name in ("payment.charge", "payment.refund", "shipment.create", "stock.release", "stock.reserve")
]

Contracts = Callable[..., Said]


@pytest.fixture
def contracts(run_in: RunIn) -> Contracts:
    """Run the command in an empty environment."""
    return lambda *arguments: run_in({}, "contracts", *arguments)


@pytest.fixture
def folder(contracts: Contracts, tmp_path: Path) -> Path:
    """The shop's contracts as files."""
    assert contracts(SHOP, "--out", str(tmp_path / "there")).code == 0
    return tmp_path / "there"


def test_without_a_folder_one_document_is_printed(contracts: Contracts) -> None:
    said = contracts(SHOP, SHOP)

    assert said.code == 0
    assert [f"{one['type']}.contract.json" for one in said.json] == FILES


def test_a_folder_gets_a_file_for_each_type(contracts: Contracts, tmp_path: Path) -> None:
    said = contracts(SHOP, "--out", str(tmp_path / "new" / "folder"))

    assert said.out.splitlines() == [f"written  {name}" for name in FILES]
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == FILES


def test_what_was_written_is_up_to_date_and_is_not_written_again(contracts: Contracts, folder: Path) -> None:
    checked, written = contracts(SHOP, "--out", str(folder), "--check"), contracts(SHOP, "--out", str(folder))

    assert (checked.code, checked.out) == (0, "")
    assert (written.code, written.out) == (0, "")


def test_the_check_names_each_file_that_is_missing_stale_or_superfluous(
    contracts: Contracts, folder: Path
) -> None:
    (folder / FILES[0]).unlink()
    (folder / FILES[1]).write_bytes((folder / FILES[1]).read_bytes() + b"\n")
    (folder / "stock.count.contract.json").write_text("{}")
    (folder / "package.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    said = contracts(SHOP, "--out", str(folder), "--check")

    assert said.code == 1
    assert said.out.splitlines() == [
        f"missing  {FILES[0]}",
        f"stale  {FILES[1]}",
        "superfluous  stock.count.contract.json",
    ]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_writing_removes_contracts_that_are_gone_and_nothing_else(contracts: Contracts, folder: Path) -> None:
    (folder / "stock.count.contract.json").write_text("{}")
    (folder / "package.json").write_text("{}")

    said = contracts(SHOP, "--out", str(folder))

    assert said.out == "removed  stock.count.contract.json\n"
    assert sorted(path.name for path in folder.iterdir()) == ["package.json", *FILES]
    assert contracts(SHOP, "--out", str(folder), "--check").code == 0


def test_the_check_of_a_folder_that_is_not_there_misses_everything(
    contracts: Contracts, tmp_path: Path
) -> None:
    said = contracts(SHOP, "--out", str(tmp_path / "nowhere"), "--check")

    assert said.code == 1
    assert said.out.splitlines() == [f"missing  {name}" for name in FILES]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ((SHOP, "--check"), 2, "expected --out DIR"),
        (("examples.shop.nothing",), 1, "cannot be imported"),
        (("contracts.limits",), 1, "expected a Command or Event with type="),
        ((SHOP, "contracts.limits"), 1, "module contracts.limits"),
        ((SHOP, "--out", "/dev/null"), 1, "/dev/null"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    contracts: Contracts, arguments: tuple[str, ...], code: int, reason: str
) -> None:
    said = contracts(*arguments)

    assert (said.code, said.out) == (code, "")
    assert reason in said.err
    assert len(said.err.splitlines()) == 1


def test_the_shop_s_contracts_print_as_they_are_written(contracts: Contracts, folder: Path) -> None:
    written = [json.loads((folder / name).read_text()) for name in FILES]

    assert contracts(SHOP).json == written
