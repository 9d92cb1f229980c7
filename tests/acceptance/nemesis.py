"""Kills parts of a deployment while they have work in hand, and starts them anew.

A part is frozen first, so that what it has in hand cannot change; then it is looked at; and only when it has
something in hand it is killed, and the kill counted. Else it goes on as if nothing had been.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from tests.acceptance.stand import Part, Role, Stand
from tests.waiting import until

PASSED_MAX: Final = 1
"""Chances that a strike lets pass, at most, so that not only the beginnings of work are hit."""

OWNED: Final = """
    select count(*)
      from waypost.execution
     where owner = %s
"""

LULL_SECONDS: Final = 10.0
"""Without work for a role: what is left may have had so many bad tries that the next one is far away."""

ROUND: Final[tuple[Role, ...]] = ("worker", "worker", "relay", "receiver")
"""Whom one round strikes, unless it is told otherwise."""


@dataclass(slots=True)
class Nemesis:
    """Strikes the parts of `stand`, in rounds of which `chance` draws the order. `feed` sees to it that parts of a
    role have work to strike at, and says whether they have any: it is called again and again. In `returns` the
    parts come back. Those whose names are in `spared` are left alone.
    """

    stand: Stand
    returns: asyncio.TaskGroup
    chance: random.Random
    feed: Callable[[Role], Awaitable[bool]]
    whom: Sequence[Role] = ROUND
    spared: frozenset[str] = frozenset()
    hits: Counter[str] = field(default_factory=Counter[str])
    _looked_at: set[str] = field(default_factory=set[str])
    """Parts that a strike looks at: no other one takes them for its victims."""
    _returning: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])

    async def round(self) -> None:
        for role in self.chance.sample(self.whom, len(self.whom)):
            await self.strike(role)

    async def storm(self) -> None:
        """A round of which all strikes come at once."""
        await asyncio.gather(*(self.strike(role) for role in self.whom))

    async def strike(self, role: Role) -> None:
        """Wait until a part of that role has work in hand, kill it, count that, and let it come back by itself.

        When there is no work left for the role, or none comes for a while, nobody is struck.
        """
        deadline = time.monotonic() + LULL_SECONDS
        passed = self.chance.randint(0, PASSED_MAX)

        async def struck() -> bool:
            nonlocal passed
            if not await self.feed(role) or time.monotonic() > deadline:
                return True
            for victim in self._victims(role):
                async with self._alone_with(victim) as may:
                    if not may or not await self._in_hand(victim):
                        continue
                    passed -= 1
                    if passed < 0 and await self._kill_if_at_work(victim):
                        self._returning[victim.name] = self.returns.create_task(victim.start())
                        return True
            return False

        await until(struck, what=f"work in the hands of a {role}, after {dict(self.hits)}")

    def _victims(self, role: Role) -> list[Part]:
        found = [part for part in self.stand.parts if part.role == role and part.name not in self.spared]
        return self.chance.sample(found, len(found))

    @asynccontextmanager
    async def _alone_with(self, victim: Part) -> AsyncGenerator[bool]:
        """Whether it works, and no other strike looks at it meanwhile."""
        if self._is_away(victim) or victim.name in self._looked_at:
            yield False
            return
        self._looked_at.add(victim.name)
        try:
            yield True
        finally:
            self._looked_at.remove(victim.name)

    async def _kill_if_at_work(self, victim: Part) -> bool:
        victim.freeze()
        try:
            at_work = await self._in_hand(victim)
            if at_work:
                await victim.kill()
                self.hits[victim.role] += 1
        finally:
            victim.thaw()
        return at_work

    async def _in_hand(self, part: Part) -> bool:
        """Whether `part` has work that is lost or left unknown if it dies now.

        A worker owns executions, a relay has sent a command that is not answered yet, to a receiver replies
        have been written whole that it has not answered, and a desk acts on a command.
        """
        match part.role:
            case "worker":
                return await self.stand.one(OWNED, part.worker_id) > 0
            case "relay":
                return not await self.stand.is_answered(part)
            case "receiver":
                return await self.stand.posting() > 0
            case "desk":
                return bool(self.stand.runs_of(part))

    def _is_away(self, part: Part) -> bool:
        """Whether it does not work again yet."""
        returning = self._returning.get(part.name)
        return returning is not None and not returning.done()

    async def rest(self) -> None:
        """Strike no more; returns when every part works again."""
        await asyncio.gather(*self._returning.values())
