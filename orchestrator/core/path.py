"""Where in its program an ask stands.

    path    = *( scope "/" / branch "/" ) segment
    segment = name [ "#" ordinal ]          ; ordinal of this name in this frame, from 2; the first has none

A path depends only on where the program is, never on which outcome came first.
"""

from __future__ import annotations

from typing import Final

from orchestrator.core.errors import LimitExceeded

SAFE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
PATH_BYTES_MAX: Final = 512
DEPTH_MAX: Final = 32
"""Named scopes and branches inside each other, and scopes inside each other."""


def segment(name: str) -> str:
    """`name` as a path holds it: every byte but letters, digits, `_` and `-` is percent-encoded.

    So `/ # . %` only ever mean structure; the empty name is `%`.
    """
    if name and SAFE.issuperset(name):
        return name
    encoded = "".join(
        c if c in SAFE else "".join(f"%{b:02X}" for b in c.encode("utf-8", "replace")) for c in name
    )
    return encoded or "%"


class Frame:
    """Counts names at one place of a program: the program itself, a branch or a named scope opens one."""

    __slots__ = ("counts", "prefix")

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.counts: dict[str, int] = {}

    @classmethod
    def inside(cls, path: str) -> Frame:
        """The frame of what stands at `path`: a scope or a branch. Raises LimitExceeded beyond DEPTH_MAX."""
        if path.count("/") >= DEPTH_MAX:
            raise LimitExceeded(
                f"depth_max: {DEPTH_MAX} scopes and branches inside each other at {path[:80]}…"
            )
        return cls(path + "/")

    def next(self, name: str) -> str:
        """The path of the next thing called `name` here. Raises LimitExceeded beyond PATH_BYTES_MAX."""
        ordinal = self.counts[name] = self.counts.get(name, 0) + 1
        base = self.prefix + segment(name)
        path = base if ordinal == 1 else f"{base}#{ordinal}"
        if len(path) > PATH_BYTES_MAX:
            raise LimitExceeded(f"a path of {len(path)} bytes, at most {PATH_BYTES_MAX}: {path[:80]}…")
        return path


def patch_path(name: str) -> str:
    """Where the marker of a patch stands: outside of all frames, so that it moves no other path."""
    return f"patched:{segment(name)}"


def undo_path(path: str, attempt: int) -> str:
    """Where the `attempt`-th try (from 1) to undo what stands at `path` is asked."""
    return f"{path}/undo" if attempt == 1 else f"{path}/undo#{attempt}"


def probe_path(path: str, number: int) -> str:
    """Where it is asked for the `number`-th time (from 1) what became of what stands at `path`."""
    return f"{path}/probe" if number == 1 else f"{path}/probe#{number}"


def mutex_path(path: str) -> str:
    """Where what stands at `path` waits for its mutex."""
    return f"{path}/mutex"


def undone_at(path: str) -> str | None:
    """The path of the step that is undone at `path`; None when that is no undo."""
    step, _, last = path.rpartition("/")
    return step if step and last.partition("#")[0] == "undo" else None


def name_at(path: str) -> str:
    """The name of what is asked at `path`, without where it stands and which time it is."""
    return path.rpartition("/")[2].partition("#")[0]
