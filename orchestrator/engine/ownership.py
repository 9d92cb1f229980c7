"""One execution while it is ours: decide, do, commit, release."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Protocol, TypeVar

from contracts.errors import NotEncodable, TooLarge
from contracts.limits import FACTS_WARN, PAYLOAD_BYTES_MAX
from contracts.objects import OBJECTS, StoreAway, StoreDenied
from contracts.observer import Observer
from contracts.sensitive import unless_sensitive
from orchestrator.core.errors import (
    PAYLOAD_UNAVAILABLE,
    UNSTORABLE,
    Halt,
    LimitExceeded,
    in_words,
    storable,
)
from orchestrator.core.fact import Fact
from orchestrator.core.machine import Machine
from orchestrator.core.segments import Segments, anchor_of
from orchestrator.core.status import TERMINAL, Status
from orchestrator.engine.clock import Clock
from orchestrator.engine.committer import BadTurn, Committer, LeaseLost
from orchestrator.engine.families import begins
from orchestrator.engine.inputs import Inputs, acted_in, deaths_at_end, noted_in, stopped_by
from orchestrator.engine.lease import Lease
from orchestrator.engine.message import Wire
from orchestrator.engine.parking import Parked, Parking
from orchestrator.engine.transaction import Transactions
from orchestrator.engine.turn import asks_for_message, asks_for_task, turn_of
from orchestrator.engine.work import Run, Work
from orchestrator.objects.large import (
    Large,
    PartGone,
    is_elsewhere,
    is_large,
    put_turn,
    whole_facts,
    whole_mail,
)
from orchestrator.store.commits import Turn
from orchestrator.store.executions import UNREADABLE, Claim, Mail

Json = Any
T = TypeVar("T")

GRACE_SECONDS: Final = 0.02
"""How long a plain local step may run before its `asked` is committed without its end."""

STORE_PAUSE_SECONDS: Final = 0.1
"""Before the payload store is asked again, at most twice that; twice as long after each failure, up to 6.4 s."""

COMPUTE_SECONDS_WARN: Final = 1.0
COMPUTE_SECONDS_MAX: Final = 10.0
"""Of one resume of a flow: beyond it the flow computes instead of waiting, and the execution is held."""


DEATHS_MAX: Final = 10
"""Workers that died in a row while they owned an execution; then it is held, before it takes more with it."""


class Flow(Protocol):
    """What the engine must know of a flow."""

    @property
    def name(self) -> str: ...

    def program(self, machine: Machine, input: Json) -> Coroutine[Any, Any, Json]: ...  # noqa: A002  # an execution's input, everywhere


@dataclass(frozen=True, slots=True)
class Loaded:
    """An execution's journal (None when its machine is still in memory), its unread mail, and what it has read."""

    journal: list[Fact] | None
    mail: list[Mail]
    mail_read: int


@dataclass(slots=True)
class Engine:
    """What all executions of one worker share.

    `reload` reads an execution again, its mail after the given number (None: what is unread); it raises
    LeaseLost when the execution is no longer ours (whoever claims sets it). `forgetful` is for tests: an
    execution is let go after each fact, and each next one begins with a replay.
    """

    lease: Lease
    clock: Clock
    committer: Committer
    parking: Parking
    wire: Wire
    observer: Observer
    run_step: Run
    transactions: Transactions | None = None
    reload: Callable[[Claim, int | None], Awaitable[Loaded]] = field(init=False)
    forgetful: bool = False
    draining: bool = False
    owned: dict[str, Ownership] = field(default_factory=dict[str, "Ownership"])


class Stopped(Halt):
    """A stopped execution got orders, but none to resume it: it stays as it is."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.stopped_by = code


class Ownership:
    """The turns of one execution under one claim, until it is released, finished, held or lost."""

    def __init__(self, engine: Engine, claim: Claim, flow: Flow) -> None:
        self.claim = claim
        self._engine = engine
        self._flow = flow
        self._at: Machine | None = None
        self._inputs = Inputs()
        self._work = Work(
            claim,
            engine.run_step,
            arrive=self.wake,
            observer=engine.observer,
            transactions=engine.transactions,
        )
        self._position = claim.position
        self._mail_read = claim.mail_read
        self._status = Status(claim.status)
        self._began = claim.at
        self._said_held = ("", "")
        self._mail_waits = False
        self._waiter: asyncio.Future[None] | None = None

    async def run(self, loaded: Loaded | None, machine: Machine | None) -> None:
        """Take turns until the execution is no longer ours. What is not `loaded` is read first.

        What goes wrong with this execution holds it; nothing of that is raised.
        """
        parked = False
        try:
            parked = await self._own(loaded, machine)
        except LeaseLost:
            self._engine.observer.saw(
                "execution lost", execution=self.claim.execution, fence=self.claim.fence
            )
        finally:
            self._work.abandon()
            if not parked:
                self._evict()

    async def _own(self, loaded: Loaded | None, machine: Machine | None) -> bool:
        self._at = machine
        self._engine.observer.saw(
            "execution.owned",
            flow=self.claim.definition,
            version=self.claim.version,
            trigger=None if self.claim.fence > 1 else trigger_of(loaded),
            waited=None if loaded is None else waited(self.claim.at, loaded, machine),
        )
        while True:
            if loaded is None:
                self._evict()
                loaded = await self._engine.reload(self.claim, None)
                self._mail_read = loaded.mail_read
                self._inputs = Inputs()
                self._work.again()
            turn = await self._guarded(loaded)
            if turn is not None:
                return self._park(turn)
            loaded = None

    async def _guarded(self, loaded: Loaded) -> Turn | None:
        """The turn that released the execution; None when its row did not match, so that it is read again."""
        try:
            try:
                if loaded.mail:
                    await self._take_in(loaded.mail)
                if loaded.journal:
                    await self._complete(loaded.journal)
                self._begin(loaded)
                return await self._take_turns()
            except Halt as halt:
                alone = isinstance(halt, Computes | Stopped | Unreadable | Deadly)
                code = halt.stopped_by if isinstance(halt, Stopped) else halt.code
                return await self._hold(code, str(halt), alone=alone)
        except (LeaseLost, asyncio.CancelledError):
            raise
        except BadTurn as bad:
            return await self._hold(UNSTORABLE, str(bad), alone=True)
        except BaseException as error:  # noqa: BLE001  # a mistake of ours in one execution must not strand it
            return await self._hold(UNSTORABLE, in_words(error), alone=True)

    def _begin(self, loaded: Loaded) -> None:
        """Bring the machine to where the journal ends."""
        if self._at is None:
            journal = loaded.journal or []
            bad = next((fact for fact in journal if fact.kind == UNREADABLE), None)
            if bad is not None:
                raise Unreadable(f"the journal cannot be read at position {bad.position}: {bad.data['why']}")
            self._at = Machine(
                self._flow.program,
                execution=self.claim.execution,
                payload_max=Large.bytes_max(),
                sent_max=Large.bytes_max() if self._engine.wire.tickets else PAYLOAD_BYTES_MAX,
            )
            self._at.position = self._position
            self._said_held = said_held(journal)
            if len(journal) > 1:  # else it was only started
                self._remember(journal)
            self._at.replay([*journal, *self._at.new], now=self._engine.clock.now())
            self._at.segments = segments_of(journal, self.claim.execution, self._engine.wire.segment_gap)

    def _remember(self, journal: Sequence[Fact]) -> None:
        """What a journal says of the orders that an execution got, and of the workers that it had."""
        self._inputs.acted, self._inputs.noted = acted_in(journal), noted_in(journal)
        stopped = stopped_by(journal)
        if stopped is not None:
            self._obey_resume(stopped)
        elif deaths_at_end(journal) >= DEATHS_MAX:
            raise Deadly(f"{DEATHS_MAX} workers in a row died while they owned it")

    async def _take_in(self, mail: list[Mail]) -> None:
        """Raises Unreadable for what cannot be opened, Elsewhere for what the payload store does not give: it is not
        read, so nothing of it is lost.
        """
        if any(map(is_elsewhere, mail)):
            mail = await self._patiently(lambda: whole_mail(self.claim.tenant, mail), StoreAway)
        self._inputs.add(mail)
        bad = next((one for one in mail if one.sealed), None)
        if bad is not None:
            raise Unreadable(f"mail {bad.number} cannot be read: {bad.sealed}")
        gone = next((one.gone for one in mail if one.gone), None)
        if gone is not None:
            raise Elsewhere(gone)

    async def _complete(self, journal: Sequence[Fact]) -> None:
        """Give facts the parts that are in the payload store. Raises Elsewhere."""
        if not any(OBJECTS in fact.data for fact in journal):
            return
        try:
            await self._patiently(lambda: whole_facts(self.claim.tenant, journal), StoreAway)
        except PartGone as gone:
            raise Elsewhere(str(gone)) from None

    async def _put_large(self, turn: Turn) -> None:
        """What is too large for a row is in the payload store before the commit that names it."""
        kept = Large.kept
        if kept is not None and is_large(turn):
            await self._patiently(lambda: put_turn(kept, turn), StoreAway, StoreDenied)

    async def _patiently(self, do: Callable[[], Awaitable[T]], *passing: type[Exception]) -> T:
        """What `do` gives, tried again while the payload store is away. Raises LeaseLost when it is so for too long."""
        failures = 0
        while True:
            self._check_lease()
            try:
                return await do()
            except passing as error:
                failures += 1
                self._engine.observer.saw(
                    "payload store away", execution=self.claim.execution, error=str(error), tries=failures
                )
                await asyncio.sleep(STORE_PAUSE_SECONDS * 2 ** min(failures, 6) * random.uniform(0.5, 1))  # noqa: S311  # jitter

    def _obey_resume(self, stopped: Fact) -> None:
        """An order to resume comes before everything else that a stopped execution got."""
        order = self._inputs.resume()
        if order is None:
            raise Stopped(stopped.data["code"], stopped.data.get("reason") or "it stays stopped")
        said = order.read()
        data = {"by": said.get("by"), "reason": said.get("reason"), "mail": order.number, "early": True}
        self._machine.remark("resumed", "", data, order.received_at, actor=f"operator:{said.get('by')}")

    @property
    def _machine(self) -> Machine:
        assert self._at is not None, "the machine was let go"
        return self._at

    def _evict(self) -> None:
        if self._at is not None:
            self._at.evict()
            self._at = None

    # ---- turns ---------------------------------------------------------------------------------------------

    async def _take_turns(self) -> Turn | None:
        engine, machine, work = self._engine, self._machine, self._work
        self._feed()
        if not engine.forgetful and self._may_run_early():
            work.begin(machine, position=self._position)
            await asyncio.sleep(0)  # a coroutine that waits for nothing ends here,
            await asyncio.sleep(0)  # and is known to have ended here: it needs no timer
            await self._wait(GRACE_SECONDS)
            self._tell()
        while True:
            release = machine.continues or (not work and (engine.draining or not machine.has_runnable()))
            turn = await self._commit(release=release)
            if turn is None or turn.release:
                return turn
            if not engine.draining:
                self._check_lease()
                work.begin(machine, position=self._position)
            await self._wait(None)
            if work.has_offers and not await self._commit_offer():
                return None
            if engine.forgetful:
                return None
            self._tell()
            await self._read_more()
            self._feed()

    def _may_run_early(self) -> bool:
        """Whether all that the turn asks for is plain local steps: their ends may go with their asking."""
        machine = self._machine
        runnable = machine.runnable()
        return (
            bool(runnable)
            and self._engine.lease.holds
            and not any(ask.needs_commit for ask in runnable)
            and not machine.follows
            and not any(acts_elsewhere(fact) for fact in machine.new)
        )

    def _feed(self) -> None:
        machine = self._machine
        if not (
            self._inputs.unread or self._work.has_arrived or machine.next_due() or machine.undoing.unsettled
        ):
            return
        began = time.monotonic()
        if self._engine.forgetful and self._work.has_arrived:
            self._tell()
        else:
            most = 1 if self._engine.forgetful else None
            self._inputs.feed(self._machine, self._engine.clock.now(), most=most)
            self._tell()
        self._work.stop_closed(self._machine)
        self._check_speed(time.monotonic() - began)

    def _tell(self) -> None:
        self._work.tell(self._machine, self._engine.clock)

    def _check_speed(self, took: float) -> None:
        if took > COMPUTE_SECONDS_WARN:
            self._engine.observer.saw("flow computes", execution=self.claim.execution, seconds=round(took, 1))
        if took > COMPUTE_SECONDS_MAX:
            raise Computes(f"the flow computes instead of waiting: {took:.0f} s in one turn, at most 10 s")

    def _check_lease(self) -> None:
        if not self._engine.lease.holds:
            raise LeaseLost(self.claim.execution)

    async def _wait(self, seconds: float | None) -> None:
        """Until something arrives, a time falls due, or `seconds` have passed."""
        if self._work.has_arrived or self._work.has_offers or self._mail_waits:
            return
        loop = asyncio.get_running_loop()
        due = self._machine.next_due()
        if due is not None:
            left = max(0.0, (due[0] - self._engine.clock.now()).total_seconds())
            seconds = left if seconds is None else min(seconds, left)
        self._waiter = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self.wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Look again: something came."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def waits_for_work(self) -> bool:
        """Whether it waits for a local step: then nobody else tells it of new mail."""
        return self._waiter is not None

    @property
    def mail_known(self) -> int:
        """The number of the last mail that it has read."""
        return self._mail_read + self._inputs.mail + len(self._inputs.unread)

    def notice_mail(self) -> None:
        """There is mail that it has not read."""
        self._mail_waits = True
        self.wake()

    async def _read_more(self) -> None:
        if self._mail_waits:
            self._mail_waits = False
            await self._take_in((await self._engine.reload(self.claim, self.mail_known)).mail)

    # ---- commits -------------------------------------------------------------------------------------------

    async def _commit(self, *, release: bool) -> Turn | None:
        """Commit what is new, and what follows from it. None when the row did not match."""
        machine = self._machine
        held = machine.held if not self._work else None  # what still runs ends before a person is asked
        if held is not None and (held.code, held.path) != self._said_held:
            self._said_held = (held.code, held.path)
            machine.remark(
                "held", held.path, {"code": held.code, "reason": held.reason}, self._engine.clock.now()
            )
        return await self._submit(
            machine, Status.HELD if held is not None else machine.status, release=release
        )

    async def _commit_offer(self) -> bool:
        """Commit the transaction of a function with the fact that it ended, and let the program see that.

        False when the row did not match. Nothing else is uncommitted now, so the fact is the next one.
        """
        machine, work = self._machine, self._work
        offer = work.next_offer()
        if offer is None:
            return True
        try:
            fact = machine.foresee(offer.path, offer.value, self._engine.clock.now())
        except (NotEncodable, TooLarge) as error:
            offer.reject(error)
            return True
        self._check_lease()
        turn = self._turn(machine, [fact], self._status, release=False)
        await self._put_large(turn)
        stored = await offer.commit(turn)
        if stored is not None:
            work.settled(offer.path)
        if stored:
            self._stored(turn, machine)
            began = time.monotonic()
            machine.believe(fact)
            work.stop_closed(machine)
            self._check_speed(time.monotonic() - began)
        return stored is not False

    async def _hold(self, code: str, reason: str, *, alone: bool) -> Turn | None:
        """Commit the input at which the program stopped, and why; then a person is needed.

        With `alone`, only why: what the turn said cannot be stored, so no mail is read. The orders that woke
        the execution count as obeyed, else they would wake it for ever.
        """
        machine = self._at
        data: dict[str, Json] = {"code": code, "reason": storable(reason)}
        if machine is None or alone:
            machine = Machine(self._flow.program)
            machine.position = self._position
            self._inputs = self._inputs.unread_again()
            orders = [mail.number for mail in self._inputs.refuse_orders()]
            data = data | ({"orders": orders} if orders else {})
        machine.remark("held", "", data, self._engine.clock.now())
        turn = await self._submit(machine, Status.HELD, release=True)
        if turn is not None:
            self._engine.observer.saw(
                "execution held",
                execution=self.claim.execution,
                code=code,
                reason=unless_sensitive(reason),
            )
        return turn

    async def _submit(self, machine: Machine, status: Status, *, release: bool) -> Turn | None:
        turn = self._turn(machine, machine.take_new(), status, release=release)
        machine.follows.clear()
        if turn.facts or turn.mail or turn.release or turn.let_go:
            await self._put_large(turn)
            if not await self._engine.committer.submit(turn):
                return None
            self._stored(turn, machine)
        return turn

    def _turn(self, machine: Machine, facts: list[Fact], status: Status, *, release: bool) -> Turn:
        turn = turn_of(
            self.claim,
            position=self._position,
            machine=machine,
            facts=facts,
            inputs=self._inputs,
            mail_known=self.mail_known,
            before=self._status,
            status=status,
            release=release,
            clock=self._engine.clock,
            wire=self._engine.wire,
            bases=bases_of(machine, facts),
        )
        turn.began = self._began
        return turn

    def _stored(self, turn: Turn, machine: Machine) -> None:
        facts = self._position - machine.journal.before
        if facts < FACTS_WARN <= facts + len(turn.facts):
            self._engine.observer.saw("journal is long", execution=self.claim.execution, facts=FACTS_WARN)
        if turn.facts:
            self._engine.observer.saw(
                "turn.committed",
                flow=self.claim.definition,
                version=self.claim.version,
                facts=turn.facts,
                taken_back=[position for position, _ in (*turn.taken_back, *turn.tasks_back)],
                began=machine.began,
            )
        if self._engine.committer.traced:
            self._began = self._engine.clock.now()
        self._position += len(turn.facts)
        self._mail_read += turn.mail
        self._inputs.committed()
        self._work.stored()
        self._status = Status(turn.status)
        if self._status in TERMINAL:
            self._engine.observer.saw(
                "execution finished", execution=self.claim.execution, flow=self._flow.name, status=turn.status
            )

    def _park(self, turn: Turn) -> bool:
        """Keep the machine for the next turn, when there will be one soon; whether it was kept."""
        if turn.status != Status.OPEN or self._engine.forgetful or self._work or self._engine.draining:
            return False
        if self._machine.continues:
            return False
        parked = Parked(self._machine, self.claim.fence, self._position)
        self._engine.parking.park(self.claim.execution, parked)
        return True


def acts_elsewhere(fact: Fact) -> bool:
    """Whether a fact leaves something to others with its turn: a message, a task, another execution."""
    asks = fact.kind == "asked" and (asks_for_message(fact) or asks_for_task(fact))
    return asks or begins(fact)


def said_held(journal: Sequence[Fact]) -> tuple[str, str]:
    """Code and path of the last `held` fact: what people are told holds the execution."""
    fact = next((fact for fact in reversed(journal) if fact.kind == "held"), None)
    return ("", "") if fact is None else (fact.data.get("code", ""), fact.path)


def segments_of(journal: Sequence[Fact], execution: str, gap: timedelta | None) -> Segments | None:
    """Where the trace of `journal` is; None when it has no segments."""
    if gap is None or not journal:
        return None
    segments = Segments(anchor_of(journal[0].data.get("traceparent"), execution), gap)
    for fact in journal:
        segments.go_on(fact)
    return segments


def bases_of(machine: Machine, facts: Sequence[Fact]) -> dict[int, str]:
    """The traceparent of the segment of each of `facts`, which are new; nothing when there are no segments."""
    bases: dict[int, str] = {}
    if machine.segments is not None:
        for fact in facts:
            machine.segments.go_on(fact)
            bases[fact.position] = machine.segments.base
    return bases


def trigger_of(loaded: Loaded | None) -> str:
    """What started an execution that nobody has owned before: somebody who wanted it, an event, or its parent."""
    journal = loaded.journal if loaded is not None else None
    said = journal[0].data if journal else {}
    return "event" if "event" in said else "parent" if "parent" in said else "start"


def waited(at: datetime, loaded: Loaded, machine: Machine | None) -> float | None:
    """Seconds from when an execution that was claimed `at` could go on; None when nothing says since when."""
    since = [mail.received_at for mail in loaded.mail[:1]]
    if loaded.journal and (len(loaded.journal) == 1 or loaded.journal[-1].kind == "orphaned"):
        since.append(loaded.journal[-1].at)
    due = machine.next_due() if machine is not None else None
    if due is not None and due[0] <= at:
        since.append(due[0])
    return (at - min(since)).total_seconds() if since else None


class Unreadable(Halt):
    """A fact that some client of the database wrote cannot be read."""

    code: ClassVar[str] = UNSTORABLE


class Elsewhere(Unreadable):
    """A part that is in the payload store cannot be had there."""

    code: ClassVar[str] = PAYLOAD_UNAVAILABLE


class Deadly(LimitExceeded):
    """Whoever takes this execution up dies of it, so nobody does any more until a person looks."""


class Computes(LimitExceeded):
    """The flow blocks the event loop: nothing of the turn is kept, since it cannot be known where it stands."""
