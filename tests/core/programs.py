"""Random flows: a tree of calls, steps, children, waits, loops, scopes and branches, and one coroutine that walks it.

A flow keeps its own count of names, apart from the machine's, and says with each ask at which path it expects it
and in which scopes. Where a scope or a fork ends, and where it hears that it is to end, it leaves a mark in its
journal, so that whoever reads that needs no program.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, assert_never

from hypothesis import strategies as st
from pydantic import create_model

from contracts.messages import Action
from orchestrator import (
    Cancelled,
    Command,
    Context,
    Effect,
    NotDone,
    Retry,
    command,
    local,
    seconds,
    workflow,
)
from orchestrator.core.errors import FlowError, is_fault
from orchestrator.core.path import mutex_path
from orchestrator.core.terms import Undo
from orchestrator.workflow import Workflow
from tests.core.places import Place

Undone: TypeAlias = Literal["no", "fixed", "exact", "needs reply", "local"]
"""How an ask is undone: not at all, by a command that needs no reply, by one that the reply makes exact, by one
that cannot be made without the reply, or by a function."""

Policy: TypeAlias = Literal["exponential", "fixed", "linear", "total", "named", "once", "probed", "watched"]
"""How a local step is tried: by the shape of its waits, by a total time, for some errors only, at most once, with a
probe, or with a watch on each try.
"""

TIMEOUT_SECONDS = 50
WITHIN_RETRY_SECONDS = 8
TOTAL = "-total"
"""How the names of steps end that are tried for a total time."""
RETRIED = "c"
"""The code of the errors that a policy for some errors names."""
SLEEP_SECONDS = 30
WITHIN_SECONDS = 40
EVENTS: tuple[str, ...] = ("E", "F")
KEYS: tuple[str, ...] = ("k", "l")


@dataclass(frozen=True, slots=True)
class Ask:
    """A call, a task, a local step or a transaction; when `hold`, a person decides about an unknown outcome, which a
    transaction never has. With a `mutex` it is asked for when it is its turn.
    """

    kind: Literal["call", "task", "step", "transaction"]
    name: str = "a"
    undo: Undone = "no"
    hold: bool = False
    timed: bool = False
    attempts: int = 1
    policy: Policy = "exponential"
    mutex: str | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """For an event; few types and keys, so that waits and events meet."""

    type: str = "E"
    key: str = "k"
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Child:
    """Another flow, which is waited for."""

    name: str = "c"
    undo: Undone = "no"
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Another flow, which is not waited for."""

    keyed: bool = False


@dataclass(frozen=True, slots=True)
class Unfit:
    """A call whose argument cannot be stored."""


@dataclass(frozen=True, slots=True)
class Sleep: ...


@dataclass(frozen=True, slots=True)
class Draw: ...


@dataclass(frozen=True, slots=True)
class Pivot:
    """A point of no return; a UsageError inside of a branch."""


@dataclass(frozen=True, slots=True)
class Fail: ...


@dataclass(frozen=True, slots=True)
class Bug:
    """A fault that a deploy will mend. It does nothing inside of a `finally`: what that asks on the way out is
    recorded, and a mended program would not ask it.
    """


Kind: TypeAlias = Literal[
    "seq", "loop", "try", "finally", "deaf", "saga", "scope", "all", "settle", "first", "any", "map", "within"
]


@dataclass(frozen=True, slots=True)
class Block:
    """`seq`: one after the other. `loop`: twice. `try`: the last part is done when the others fail, `finally`:
    whatever happens, `deaf`: when the branch is told to end, which it does not. `saga` and `scope`: undone together,
    under a name or without one. `within`: in a given time. `map`: two parts at once. The others: each part is a branch.
    """

    kind: Kind
    parts: tuple[Node, ...]


Node: TypeAlias = Ask | Child | Wait | Unfit | Sleep | Draw | Start | Pivot | Fail | Bug | Block


class Boom(Exception):
    """An error of the program itself."""


@dataclass(slots=True)
class Program:
    """The flow that walks `tree`, with a `mutex` as a whole or without one. Its bugs raise until `mended`; `drawn` is
    what its last run drew, `expected` are the paths at which it thought that it asked.
    """

    tree: Node
    mutex: str | None = None
    mended: bool = False
    drawn: list[str] = field(default_factory=list[str])
    expected: set[str] = field(default_factory=set[str])

    @property
    def flow(self) -> Workflow[int, None]:
        key = self.mutex

        @workflow(name="random", version="1", mutex=None if key is None else lambda _: key)
        async def flow(ctx: Context, n: int) -> None:
            self.drawn, self.expected = [], set()
            walker = Walker(self, ctx)
            root = Place(scopes=("",))
            try:
                await walker.walk(self.tree, root)
            except (Exception, Cancelled) as error:
                walker.mark_failure(error, "closing", scope="", well=False)
                raise
            walker.mark("closing", scope="", well=True)

        return flow


class Walker:
    """One run of a program."""

    def __init__(self, program: Program, ctx: Context) -> None:
        self.program = program
        self.ctx = ctx

    def mark(self, what: str, **more: Any) -> None:
        """Leave a note in the journal, as the context does for what is only written down."""
        self.ctx._machine.note("mark", "mark", {"what": what} | more)  # pyright: ignore[reportPrivateUsage]  # authors cannot

    def mark_failure(self, error: BaseException, what: str, **more: Any) -> None:
        """The same, unless `error` is a bug: a mended program would not say it."""
        if not is_fault(error):
            self.mark(what, **more)

    def path(self, place: Place, name: str) -> str:
        path = place.next(name)
        self.program.expected.add(path)
        return path

    async def walk(self, node: Node, place: Place, *, safe: bool = False) -> None:
        match node:
            case Ask():
                path = self.path(place, named(node))
                if node.mutex is not None:
                    self.program.expected.add(mutex_path(path))
                await self.waits(place, ask(self.ctx, node, path, place))
            case Child():
                await self.waits(place, child(self.ctx, node, self.path(place, node.name), place))
            case Wait():
                self.path(place, node.type)
                timeout = seconds(TIMEOUT_SECONDS) if node.timed else None
                await self.waits(place, self.ctx.event(node.type, key=node.key, timeout=timeout))
            case Unfit():
                self.path(place, "unfit")
                await self.waits(
                    place, self.ctx.call("svc", "unfit", {"v": "\x00"}, undo=command("svc", "undo"))
                )
            case Sleep():
                self.path(place, "sleep")
                await self.waits(place, self.ctx.sleep(seconds(SLEEP_SECONDS)))
            case Block():
                await self.block(node, place, safe=safe)
            case _:
                self.at_once(node, safe=safe)

    def at_once(self, node: Draw | Start | Pivot | Fail | Bug, *, safe: bool) -> None:
        match node:
            case Start():
                handle = self.ctx.start(kid, None, key="k" if node.keyed else None)
                self.program.drawn.append(str(handle.execution_id))
            case Draw():
                self.program.drawn += [
                    str(self.ctx.uuid()), str(self.ctx.random()), self.ctx.now().isoformat()
                ]  # fmt: skip
            case Pivot():
                self.ctx.pivot()
            case Fail():
                raise Boom("as written")
            case Bug():
                if not self.program.mended and not safe:
                    raise AttributeError("a bug")

    async def waits(self, place: Place, op: Coroutine[Any, Any, object]) -> None:
        """Each time that this branch is told to end leaves a mark."""
        try:
            await op
        except Cancelled:
            self.mark("cancelled", branch=place.branch)
            raise

    async def block(self, node: Block, place: Place, *, safe: bool) -> None:
        match node.kind:
            case "seq":
                await self.all(node.parts, place, safe=safe)
            case "loop":
                for _ in range(2):
                    await self.all(node.parts, place, safe=safe)
            case "try" | "finally" | "deaf":
                await self.guarded(node, place, safe=safe)
            case "saga" | "scope":
                await self.scope(node, place, safe=safe)
            case "all" | "settle" | "first" | "any" | "map" | "within":
                await self.fork(node, node.kind, place, safe=safe)
            case _:
                assert_never(node.kind)

    async def guarded(self, node: Block, place: Place, *, safe: bool) -> None:
        first, last = node.parts[:-1], node.parts[-1]
        if node.kind == "finally":
            try:
                await self.all(first, place, safe=True)
            finally:
                await self.walk(last, place, safe=safe)
            return
        caught = (FlowError, Boom) if node.kind == "try" else (Cancelled,)
        try:
            await self.all(first, place, safe=safe)
        except caught:
            await self.walk(last, place, safe=safe)

    async def all(self, parts: tuple[Node, ...], place: Place, *, safe: bool) -> None:
        for part in parts:
            await self.walk(part, place, safe=safe)

    async def scope(self, node: Block, place: Place, *, safe: bool) -> None:
        inner = place.inside(self.path(place, "saga")) if node.kind == "saga" else place.scoped()
        scope, well = inner.scopes[-1], False
        try:
            async with self.ctx.saga("saga" if node.kind == "saga" else None):
                try:
                    await self.all(node.parts, inner, safe=safe)
                except (Exception, Cancelled) as error:
                    self.mark_failure(error, "closing", scope=scope, well=False)
                    raise
                self.mark("closing", scope=scope, well=True)
                well = True
        except (Exception, Cancelled) as error:
            if well and isinstance(error, Cancelled):
                self.mark("cancelled", branch=place.branch)
            self.mark_failure(error, "closed", scope=scope, well=False)
            raise
        self.mark("closed", scope=scope, well=True)

    async def fork(
        self,
        node: Block,
        mode: Literal["all", "settle", "first", "any", "map", "within"],
        place: Place,
        *,
        safe: bool,
    ) -> None:
        path = self.path(place, mode)
        parts = (Block("seq", node.parts),) if mode == "within" else node.parts
        scoped = mode not in ("all", "settle", "map")

        def branch(of: tuple[int, Node]) -> Coroutine[Any, Any, None]:
            return self.branch(of[1], place.beside(path, of[0], scoped=scoped), scoped=scoped, safe=safe)

        ops = [] if mode == "map" else [branch(part) for part in enumerate(parts)]
        well = False
        try:
            if mode == "within":
                self.program.expected.add(f"{path}.1/limit")
                await self.waits(place, self.ctx.within(seconds(WITHIN_SECONDS), ops[0]))
            elif mode == "map":
                await self.waits(place, self.ctx.map(enumerate(parts), branch, concurrency=2))
            else:
                await self.waits(place, getattr(self.ctx, mode)(*ops))
            well = True
        finally:
            self.mark("joined", fork=path, well=well)

    async def branch(self, node: Node, place: Place, *, scoped: bool, safe: bool) -> None:
        well = False
        try:
            await self.walk(node, place, safe=safe)
            well = True
        except (Exception, Cancelled) as error:
            if scoped:
                self.mark_failure(error, "closing", scope=place.scopes[-1], well=False)
            raise
        if scoped and well:
            self.mark("closing", scope=place.scopes[-1], well=True)


made: Any = create_model
Job: Any = made(
    "Job",
    __base__=Command[Any],
    __cls_kwargs__={"type": "do.it"},
    at=(str, ...),
    **{"in": (list[str], ...)},
)


def work(at: str, scopes: list[str]) -> Any:
    """What the local steps run, were they run."""


async def write(conn: Any, at: str, scopes: list[str]) -> Any:
    """What the transactions run, were they run."""


def unwork(at: str) -> None: ...


def look(at: str, scopes: list[str]) -> NotDone:
    return NotDone()


def named(node: Ask) -> str:
    name = f"{node.name}{TOTAL}" if node.policy == "total" and node.kind == "step" else node.name
    return f"hold-{name}" if node.hold else name


async def ask(ctx: Context, node: Ask, at: str, place: Place) -> None:
    timeout = seconds(TIMEOUT_SECONDS) if node.timed else None
    unknown: Literal["raise", "hold"] = "hold" if node.hold else "raise"
    scopes = list(place.scopes)
    if node.kind == "call":
        await ctx.call(
            "svc", "do.it", {"at": at, "in": scopes},
            undo=undo_of(node.undo, at), timeout=timeout, unknown=unknown, name=named(node), retry=resends_of(node),
            mutex=node.mutex,
        )  # fmt: skip
    elif node.kind == "task":
        await ctx.task(
            Job.model_validate({"at": at, "in": scopes}), queue="q", undo=undo_of(node.undo, at), timeout=timeout,
            unknown=unknown, name=named(node), retry=resends_of(node) or Retry(attempts=node.attempts),
            mutex=node.mutex,
        )  # fmt: skip
    elif node.kind == "transaction":
        await ctx.transaction(
            write, at, scopes, undo=exact_undo_of(node.undo, at), name=named(node), mutex=node.mutex
        )
    else:
        await ctx.step(
            work, at, scopes, undo=undo_of(node.undo, at), timeout=timeout, unknown=unknown, name=named(node),
            mutex=node.mutex, **promises_of(node),
        )  # fmt: skip


@workflow(name="kid", version="1")
async def kid(_: Context, said: Any) -> Any:
    """What the children run, were they run."""
    return said


async def child(ctx: Context, node: Child, at: str, place: Place) -> None:
    timeout = seconds(TIMEOUT_SECONDS) if node.timed else None
    said = {"at": at, "in": list(place.scopes)}
    await ctx.child(kid, said, undo=undo_of(node.undo, at), timeout=timeout, name=node.name)


def resends_of(node: Ask) -> Retry | None:
    if node.policy == "named":
        return Retry(attempts=node.attempts, only=(RETRIED,))
    return Retry.fixed(seconds(5), attempts=node.attempts) if node.policy == "fixed" else None


def promises_of(node: Ask) -> Any:
    tries = node.attempts
    promises: dict[Policy, dict[str, Any]] = {
        "exponential": {"retry": Retry(attempts=tries)},
        "fixed": {"retry": Retry.fixed(seconds(5), attempts=tries)},
        "linear": {"retry": Retry.linear(seconds(3), attempts=tries)},
        "total": {"retry": Retry.fixed(seconds(5), attempts=None, within=seconds(WITHIN_RETRY_SECONDS))},
        "named": {"retry": Retry(attempts=tries, only=(RETRIED,))},
        "once": {"effect": Effect.AT_MOST_ONCE},
        "probed": {"retry": Retry(attempts=tries + 1), "probe": look},
        "watched": {"retry": Retry(attempts=tries), "heartbeat": seconds(9), "attempt_timeout": seconds(20)},
    }
    return promises[node.policy]


def undo_of(how: Undone, at: str) -> Undo[Any] | None:
    exact = exact_undo_of(how, at)
    if how == "needs reply" and callable(exact):
        return lambda reply: None if reply is None else exact(reply)
    return exact


def exact_undo_of(how: Undone, at: str) -> Action | Callable[[Any], Action] | None:
    """For a transaction: what it returned is always known."""
    match how:
        case "no":
            return None
        case "fixed":
            return command("svc", "undo", {"at": at})
        case "local":
            return local(unwork, at)
        case "exact" | "needs reply":
            return lambda reply: command("svc", "undo", {"at": at, "reply": reply})


# ---- trees -----------------------------------------------------------------------------------------------------


def asks() -> st.SearchStrategy[Ask]:
    undos: list[Undone] = ["fixed", "exact", "local", "needs reply", "no"]
    kinds: list[Literal["call", "task", "step", "transaction"]] = [
        "call", "call", "task", "step", "step", "transaction",
    ]  # fmt: skip
    policies: list[Policy] = [
        "exponential", "fixed", "linear", "total", "named", "once", "probed", "watched",
    ]  # fmt: skip
    return st.builds(
        Ask,
        kind=st.sampled_from(kinds),
        name=st.sampled_from(["a", "b", "ü/#"]),
        undo=st.sampled_from(undos),
        hold=st.booleans(),
        timed=st.booleans(),
        attempts=st.integers(1, 3),
        policy=st.sampled_from(policies),
        mutex=st.sampled_from([None, None, None, "m", "n"]),
    )


def children() -> st.SearchStrategy[Child]:
    undos: list[Undone] = ["fixed", "exact", "local", "needs reply", "no", "no"]
    names = st.sampled_from(["c", "a"])
    return st.builds(Child, name=names, undo=st.sampled_from(undos), timed=st.booleans())


def waits() -> st.SearchStrategy[Wait]:
    return st.builds(Wait, type=st.sampled_from(EVENTS), key=st.sampled_from(KEYS), timed=st.booleans())


def blocks(kids: st.SearchStrategy[Node], kinds: list[Kind]) -> st.SearchStrategy[Node]:
    return st.builds(
        Block, kind=st.sampled_from(kinds), parts=st.lists(kids, min_size=2, max_size=4).map(tuple)
    )


def trees() -> st.SearchStrategy[Node]:
    """Flows of some ten parts; every second one ends with an error, so that what it did is undone."""
    others: list[Node] = [
        Sleep(),
        Draw(),
        Start(),
        Start(keyed=True),
        Pivot(),
        Pivot(),
        Fail(),
        Bug(),
        Unfit(),
    ]
    kinds: list[Kind] = [
        "seq", "loop", "try", "try", "finally", "deaf", "saga", "scope",
        "all", "all", "settle", "first", "first", "any", "map", "map", "within",
    ]  # fmt: skip
    leaf: st.SearchStrategy[Node] = st.one_of(
        asks(), asks(), asks(), children(), waits(), st.sampled_from(others)
    )
    part: st.SearchStrategy[Node] = st.recursive(leaf, lambda kids: blocks(kids, kinds), max_leaves=8)
    return st.builds(whole, st.lists(part, min_size=2, max_size=4), fails=st.booleans())


def whole(parts: Sequence[Node], *, fails: bool) -> Node:
    return Block("seq", (*parts, Fail()) if fails else tuple(parts))


def having(node: Ask, mutex: str | None) -> Ask:
    return replace(node, mutex=mutex)


def crowded_trees() -> st.SearchStrategy[Node]:
    """Flows most of whose steps have one of two mutexes."""
    keys = st.sampled_from(["m", "m", "m", "n", None])
    steps = st.builds(having, asks(), keys)
    kinds: list[Kind] = [
        "seq",
        "loop",
        "try",
        "finally",
        "deaf",
        "saga",
        "all",
        "first",
        "any",
        "map",
        "within",
    ]
    others: list[Node] = [Sleep(), Fail(), Bug(), Pivot()]
    leaf: st.SearchStrategy[Node] = st.one_of(
        steps, steps, steps, steps, waits(), children(), st.sampled_from(others)
    )
    part: st.SearchStrategy[Node] = st.recursive(leaf, lambda kids: blocks(kids, kinds), max_leaves=6)
    return st.builds(whole, st.lists(part, min_size=1, max_size=3), fails=st.booleans())


def tried_trees() -> st.SearchStrategy[Node]:
    """Flows of local steps alone, side by side and one after the other."""
    steps = asks().map(lambda node: replace(node, kind="step"))
    kinds: list[Kind] = ["seq", "try", "settle"]
    part: st.SearchStrategy[Node] = st.recursive(steps, lambda kids: blocks(kids, kinds), max_leaves=6)
    return st.builds(whole, st.lists(part, min_size=2, max_size=4), fails=st.booleans())


def patient_trees() -> st.SearchStrategy[Node]:
    """Flows in which no branch is ever stopped and nothing depends on time: what is asked in them cannot depend on
    the order in which the answers come.
    """
    untimed = asks().map(lambda node: Ask(node.kind, node.name, node.undo, node.hold))
    kinds: list[Kind] = ["seq", "loop", "try", "finally", "saga", "scope", "settle", "settle", "settle"]
    others: list[Node] = [Draw(), Start(), Fail(), Unfit()]
    lasting = children().map(lambda node: replace(node, timed=False))
    leaf: st.SearchStrategy[Node] = st.one_of(untimed, untimed, untimed, lasting, st.sampled_from(others))
    part: st.SearchStrategy[Node] = st.recursive(leaf, lambda kids: blocks(kids, kinds), max_leaves=12)
    beside = st.lists(part, min_size=2, max_size=4).map(lambda parts: Block("settle", tuple(parts)))
    return st.builds(whole, st.lists(beside, min_size=1, max_size=2), fails=st.booleans())
