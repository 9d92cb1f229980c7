"""What speaks to sockets is tested on both event loops: the relay runs on uvloop where that is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import pytest
import uvloop

ON_BOTH_LOOPS: Final = ("test_wire", "test_addresses")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    asyncio_loop: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.stem in ON_BOTH_LOOPS:
        return {**asyncio_loop, "uvloop": uvloop.new_event_loop}
    return asyncio_loop
