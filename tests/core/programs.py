"""Random flows: a tree of calls, steps, sleeps, draws, loops and `try`, and one coroutine that walks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeAlias

from hypothesis import strategies as st

from contracts.messages import Action
from orchestrator import Context, Retry, command, local, seconds, workflow
from orchestrator.core.context import Undo
from orchestrator.core.errors import FlowError
from orchestrator.workflow import Workflow

Undone: TypeAlias = Literal["no", "fixed", "exact", "needs reply", "local"]
"""How an ask is undone: not at all, by a command that needs no reply, by one that the reply makes exact, by one
that cannot be made without the reply, or by a function."""

TIMEOUT_SECONDS = 50
SLEEP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Ask:
    """A call or a local step; when `hold`, a person decides about an unknown outcome."""

    kind: Literal["call", "step"]
    name: str = "a"
    undo: Undone = "no"
    hold: bool = False
    timed: bool = False
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Unfit:
    """A call whose argument cannot be stored."""


@dataclass(frozen=True, slots=True)
class Sleep: ...


@dataclass(frozen=True, slots=True)
class Draw: ...


@dataclass(frozen=True, slots=True)
class Fail: ...


@dataclass(frozen=True, slots=True)
class Bug:
    """A fault that a deploy will mend. It does nothing inside of a `finally`: what that asks on the way out is
    recorded, and a mended program would not ask it.
    """


@dataclass(frozen=True, slots=True)
class Block:
    """`seq`: one after the other. `loop`: twice. `try`: errors are caught, and then the last part is done once
    more. `finally`: the last part is done whatever happens.
    """

    kind: Literal["seq", "loop", "try", "finally"]
    parts: tuple[Node, ...]


Node: TypeAlias = Ask | Unfit | Sleep | Draw | Fail | Bug | Block


class Boom(Exception):
    """An error of the program itself."""


@dataclass(slots=True)
class Program:
    """The flow that walks `tree`. Its bugs raise until `mended`; `drawn` is what its last run drew."""

    tree: Node
    mended: bool = False
    drawn: list[str] = field(default_factory=list[str])

    @property
    def flow(self) -> Workflow[int, None]:
        @workflow(name="random", version="1")
        async def flow(ctx: Context, n: int) -> None:
            self.drawn = []
            await self._walk(ctx, self.tree, count(n))

        return flow

    async def _walk(self, ctx: Context, node: Node, number: Iterator[int], *, safe: bool = False) -> None:
        match node:
            case Ask():
                await ask(ctx, node, next(number))
            case Unfit():
                await ctx.call("svc", "unfit", {"v": "\x00"}, undo=command("svc", "undo"))
            case Sleep():
                await ctx.sleep(seconds(SLEEP_SECONDS))
            case Draw():
                self.drawn += [str(ctx.uuid()), ctx.now().isoformat()]
            case Fail():
                raise Boom("as written")
            case Bug():
                if not self.mended and not safe:
                    raise AttributeError("a bug")
            case Block():
                await self._block(ctx, node, number, safe=safe)

    async def _block(self, ctx: Context, node: Block, number: Iterator[int], *, safe: bool) -> None:
        match node.kind:
            case "seq":
                await self._all(ctx, node.parts, number, safe=safe)
            case "loop":
                for _ in range(2):
                    await self._all(ctx, node.parts, number, safe=safe)
            case "try":
                try:
                    await self._all(ctx, node.parts, number, safe=safe)
                except (FlowError, Boom):
                    await self._walk(ctx, node.parts[-1], number, safe=safe)
            case "finally":
                try:
                    await self._all(ctx, node.parts[:-1], number, safe=True)
                finally:
                    await self._walk(ctx, node.parts[-1], number, safe=safe)

    async def _all(self, ctx: Context, parts: tuple[Node, ...], number: Iterator[int], *, safe: bool) -> None:
        for part in parts:
            await self._walk(ctx, part, number, safe=safe)


def work(n: int) -> Any:
    """What the local steps run, were they run."""


def unwork(n: int) -> None: ...


async def ask(ctx: Context, node: Ask, n: int) -> None:
    timeout = seconds(TIMEOUT_SECONDS) if node.timed else None
    unknown: Literal["raise", "hold"] = "hold" if node.hold else "raise"
    name = f"hold-{node.name}" if node.hold else node.name
    if node.kind == "call":
        await ctx.call(
            "svc", "do.it", {"n": n}, undo=undo_of(node.undo, n), timeout=timeout, unknown=unknown, name=name
        )
    else:
        await ctx.step(
            work, n, undo=undo_of(node.undo, n), timeout=timeout, unknown=unknown, name=name,
            retry=Retry(attempts=node.attempts),
        )  # fmt: skip


def undo_of(how: Undone, n: int) -> Undo[Any] | None:
    def exact(reply: Any) -> Action:
        return command("svc", "undo", {"n": n, "reply": reply})

    match how:
        case "no":
            return None
        case "fixed":
            return command("svc", "undo", {"n": n})
        case "local":
            return local(unwork, n)
        case "exact":
            return exact
        case "needs reply":
            return lambda reply: None if reply is None else exact(reply)


def asks() -> st.SearchStrategy[Ask]:
    undos: list[Undone] = ["fixed", "exact", "local", "needs reply", "no"]
    kinds: list[Literal["call", "step"]] = ["call", "step"]
    return st.builds(
        Ask,
        kind=st.sampled_from(kinds),
        name=st.sampled_from(["a", "b", "ü/#"]),
        undo=st.sampled_from(undos),
        hold=st.booleans(),
        timed=st.booleans(),
        attempts=st.integers(1, 3),
    )


def trees() -> st.SearchStrategy[Node]:
    """Flows of some ten parts; every second one ends with an error, so that what it did is undone."""
    others: list[Node] = [Sleep(), Draw(), Fail(), Bug(), Unfit()]
    kinds: list[Literal["seq", "loop", "try", "finally"]] = ["seq", "loop", "try", "finally", "try", "seq"]
    leaf: st.SearchStrategy[Node] = st.one_of(asks(), asks(), asks(), st.sampled_from(others))
    part: st.SearchStrategy[Node] = st.recursive(
        leaf,
        lambda kids: st.builds(
            Block, kind=st.sampled_from(kinds), parts=st.lists(kids, min_size=2, max_size=4).map(tuple)
        ),
        max_leaves=6,
    )
    return st.builds(whole, st.lists(part, min_size=1, max_size=4), fails=st.booleans())


def whole(parts: list[Node], *, fails: bool) -> Node:
    return Block("seq", (*parts, Fail()) if fails else tuple(parts))
