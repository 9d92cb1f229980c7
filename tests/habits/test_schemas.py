"""The schemas in the repository are those of the classes; `waypost contracts` writes them."""

from __future__ import annotations

from contracts.schemas import contracts_in, documents, files
from examples.shop import contracts
from orchestrator.cli.schemas import changes_of
from tests.cli.processes import ROOT


def test_the_shop_s_schemas_are_up_to_date() -> None:
    made = files(documents(contracts_in(vars(contracts).values())))

    assert list(changes_of(ROOT / "examples/shop/schemas", made)) == []
