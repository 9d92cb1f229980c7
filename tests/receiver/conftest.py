from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.receiver.world import Connection, Pool, World, add_sender, running


@pytest.fixture
async def world(pool: Pool, conn: Connection) -> AsyncIterator[World]:
    """A receiver with one sender, payments."""
    await add_sender(conn)
    async with running(pool, conn) as world:
        yield world
