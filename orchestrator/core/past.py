"""The recorded part of a journal, while a program runs through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from orchestrator.core.errors import STOPPING, NonDeterminism
from orchestrator.core.fact import BEGINNINGS, BYSTANDERS, PRODUCED, Fact, saying


class Past:
    """A cursor over `journal`. Input facts are taken as they come; produced facts must be the very next ones.

    Bystanders are passed on the way; `deaths` collects the workers' deaths among those, which have effect
    wherever they stand: whoever meets them tells `on_death`.
    """

    def __init__(self, journal: Sequence[Fact], *, on_death: Callable[[Fact], None]) -> None:
        self._journal = journal
        self.on_death = on_death
        self._cursor = 0
        self._tail, self.is_unfinished = ending(journal)
        self.deaths: list[Fact] = []
        self.position = 0

    @property
    def is_at_its_end(self) -> bool:
        """Whether all that the program saw when it was recorded has been replayed."""
        return self._cursor >= self._tail

    @property
    def has_more(self) -> bool:
        """Whether something that is no bystander stands behind what was passed."""
        return any(fact.kind not in BYSTANDERS for fact in islice(self._journal, self._cursor, None))

    def next_input(self) -> Fact | None:
        """The next fact that drives the program; None at the end. Raises NonDeterminism before a produced one."""
        if self._cursor == len(self._journal):
            return None
        fact = self._journal[self._cursor]
        if fact.kind in PRODUCED:
            raise NonDeterminism(
                f"the journal has {saying(fact.kind, fact.path, fact.data)} at position {fact.position}; "
                f"the program no longer asks for it"
            )
        return fact

    def take(self) -> None:
        """Pass the fact under the cursor."""
        self.position = self._journal[self._cursor].position
        self._cursor += 1

    def recorded(self) -> Fact | None:
        """What the journal says here, behind bystanders; None where it ends."""
        while self._cursor < len(self._journal):
            fact = self._journal[self._cursor]
            if fact.kind not in BYSTANDERS:
                return fact
            if fact.kind == "orphaned":
                self.deaths.append(fact)
            self.take()
        return None


def ending(journal: Sequence[Fact]) -> tuple[int, bool]:
    """Up to where a loaded journal holds all that its program said, and whether its last input lacks that.

    All that a program says at an input is committed with it, so a journal is complete, but for three ends: it was
    only started, its program was stopped, or a transaction ended, which is committed alone. What follows from a
    worker's death is said when it is replayed.
    """
    last = len(journal) - 1
    stopped = False
    while last >= 0 and journal[last].kind in BYSTANDERS:
        stopped = stopped or (journal[last].kind == "held" and journal[last].data.get("code") in STOPPING)
        last -= 1
    begun = last >= 0 and (journal[last].kind in BEGINNINGS or ends_a_transaction(journal, last))
    tail = next((i for i in range(last + 1, len(journal)) if journal[i].kind == "orphaned"), len(journal))
    return tail, stopped or begun


def ends_a_transaction(journal: Sequence[Fact], position: int) -> bool:
    """Whether the fact at index `position` ended a transaction."""
    fact = journal[position]
    if fact.kind != "ended":
        return False
    before = (journal[i] for i in range(position - 1, -1, -1))
    asked = next((one for one in before if one.kind == "asked" and one.path == fact.path), None)
    return asked is not None and asked.data.get("kind") == "transaction"
