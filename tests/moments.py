"""What the parts say happened, for tests that wait for it."""

from __future__ import annotations

import asyncio

PATIENCE_SECONDS = 30


class Moments:
    """An observer that remembers, and lets a test wait for a moment."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, object]]] = []
        self._more = asyncio.Event()

    def saw(self, moment: str, /, **fields: object) -> None:
        self.all.append((moment, fields))
        self._more.set()

    def count(self, moment: str, **fields: object) -> int:
        """How often `moment` was seen with these fields."""
        return sum(name == moment and fields.items() <= seen.items() for name, seen in self.all)

    async def until(self, moment: str, *, times: int = 1, **fields: object) -> dict[str, object]:
        """The last such moment, once it was seen `times` times; fails after half a minute, saying what was seen."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while self.count(moment, **fields) < times:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError(f"never saw {moment} {fields} {times} times; saw {self.all[-20:]}") from None
        return next(
            seen for name, seen in reversed(self.all) if name == moment and fields.items() <= seen.items()
        )
