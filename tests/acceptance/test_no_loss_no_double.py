"""No loss, no double: fifty sagas, while everything but the database and the services is killed again and again."""

from __future__ import annotations

import ast
import asyncio
import random
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.nemesis import Nemesis
from tests.acceptance.sagas import (
    FEW_KINDS,
    TROUBLE,
    Starts,
    assert_messages_arrived_as_they_were_committed,
    assert_no_mail_was_left_unread,
    assert_replies_were_the_same_bytes_until_taken,
    assert_the_journal_agrees,
    assert_the_saga_ended_as_it_should,
    counted,
    proven_hits,
    sagas,
    summary,
    taken_back,
)
from tests.acceptance.stand import LEDGER, stand

SIZES: Final = [
    pytest.param(20, 8, id="20 sagas"),
    pytest.param(50, 30, id="50 sagas", marks=pytest.mark.proof),
]
"""How many sagas, and how many deaths at least among them, each proven by what it interrupted."""

SPARE: Final = 1.25
"""Deaths for each that is to be proven: a commit that was sent may free what its worker owned, and nothing shows."""


def test_the_ledger_shares_no_code_with_us() -> None:
    tree = ast.parse(LEDGER.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names if isinstance(node, ast.Import)]
    names += [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]

    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"standardwebhooks"}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("number", "hits_min"), SIZES)
async def test_no_loss_no_double(dsn: str, tmp_path: Path, seed: int, number: int, hits_min: int) -> None:
    chance, orders = random.Random(seed), sagas(number, FEW_KINDS)
    roles = ("receiver", "relay", "worker", "worker")
    ledger = ("--seed", str(seed), "--trouble", str(TROUBLE), "--ponder", "1")
    async with stand(dsn, tmp_path, roles=roles, ledger_options=ledger) as it, asyncio.TaskGroup() as returns:
        starts = Starts(it, orders, chance.sample(orders, number))
        nemesis = Nemesis(it, returns, chance, starts.feed)
        wanted = hits_min * SPARE
        while nemesis.hits.total() < wanted and await starts.feed("worker"):
            await starts.up_to(nemesis.hits.total() / wanted)
            await nemesis.round()
        await starts.up_to(1)
        await nemesis.rest()
        views = await it.ended(*(saga.order for saga in orders))

        proven = await proven_hits(it, nemesis)
        print(counted(proven), counted(summary(it.book())))  # noqa: T201  # in the report of a failure
        assert proven.total() >= hits_min
        assert await it.at_rest() == []
        await assert_no_mail_was_left_unread(it, orders)
        await assert_messages_arrived_as_they_were_committed(it)
        unwanted = await taken_back(it)
    for saga, view in zip(orders, views, strict=True):
        assert_the_saga_ended_as_it_should(saga, view, it.book())
        assert_the_journal_agrees(view)
    assert_replies_were_the_same_bytes_until_taken(it.book(), unwanted=unwanted)
