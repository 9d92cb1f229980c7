"""Where a flow thinks that it is: its own count of names, apart from the machine's."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.path import segment


@dataclass(frozen=True, slots=True)
class Place:
    """Names are counted in `counts` under `prefix`; `scopes` are those around, from the outside in; `branch` is
    the one that is here.
    """

    prefix: str = ""
    counts: dict[str, int] = field(default_factory=dict[str, int])
    scopes: tuple[str, ...] = ()
    branch: str = ""

    def next(self, name: str) -> str:
        count = self.counts[name] = self.counts.get(name, 0) + 1
        return self.prefix + segment(name) + ("" if count == 1 else f"#{count}")

    def inside(self, path: str) -> Place:
        """In the named scope at `path`."""
        return Place(f"{path}/", {}, (*self.scopes, path), self.branch)

    def scoped(self) -> Place:
        """In a scope without a name: names are counted on."""
        scope = self.next("a scope")
        return Place(self.prefix, self.counts, (*self.scopes, scope), self.branch)

    def beside(self, fork: str, index: int, *, scoped: bool) -> Place:
        """In a branch of the fork at `fork`; one that is `scoped` is undone alone."""
        branch = f"{fork}.{index}"
        return Place(f"{branch}/", {}, (*self.scopes, branch) if scoped else self.scopes, branch)
