"""Run the benches: `python -m bench.run`. Ends with 1 when a bar is missed, and says which."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from functools import partial
from typing import Final

from bench import (
    claim_backlog,
    idle,
    local_steps,
    many_items,
    receiver,
    relay_isolation,
    replay,
    report,
    starts,
    timers,
    webhook_saga,
)
from bench.report import Taken
from bench.schedule import Schedule
from bench.server import Server, running

BENCHES: Final = {
    bench.NAME: bench
    for bench in (
        local_steps,
        webhook_saga,
        claim_backlog,
        receiver,
        starts,
        idle,
        many_items,
        timers,
        replay,
        relay_isolation,
    )
}


def main() -> int:
    given = arguments()
    schedule = Schedule(given.rounds, given.warm_up, given.window)
    taken: list[Taken] = []
    setting = ""
    for name in given.only or BENCHES:
        bench = BENCHES[name]
        with running(bench.SETTINGS) as server:
            setting = said_of(server)
            say(setting, part=name)
            before = os.getloadavg()[0]
            result = bench.run(server, schedule, partial(say, part=name))
        taken.append(Taken(result, before, os.getloadavg()[0]))
        for bar in result.bars:
            say(str(bar), part=name)
    print(report.page(taken, setting=setting))
    if not given.only:
        report.write(taken, setting=setting)
    missed = [problem for one in taken for problem in one.result.missed()]
    for problem in missed:
        print(problem)
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure Waypost: beside its peers, and beside what it must reach."
    )
    parser.add_argument(
        "--only", action="append", choices=list(BENCHES), help="this bench; writes no results"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of every measurement, 3 by default")
    parser.add_argument("--warm-up", type=float, help="seconds, instead of what each bench takes")
    parser.add_argument("--window", type=float, help="seconds, instead of what each bench takes")
    return parser.parse_args()


def said_of(server: Server) -> str:
    """The machine and the server, in a sentence or two, so that a figure can be judged."""
    settings = ", ".join(
        f"{name} {value}" for name, value in server.settings.items() if name != "server_version"
    )
    return (
        f"PostgreSQL {server.settings['server_version']} on the same machine ({settings}); "
        f"{os.cpu_count()} cores, {platform.machine()}, CPython {platform.python_version()}."
    )


BEGAN: Final = time.monotonic()


def say(words: str, *, part: str) -> None:
    """Progress, as it is made."""
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {part}: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
