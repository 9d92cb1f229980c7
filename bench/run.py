"""Run the benches: `python -m bench.run`. Ends with 1 when a bar is missed, and says which."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from typing import Final

from bench import local_steps, report
from bench.server import Server, running

BENCHES: Final = {local_steps.NAME: local_steps.run}


def main() -> int:
    given = arguments()
    schedule = local_steps.Schedule(given.rounds, given.warm_up, given.window)
    with running() as server:
        setting = said_of(server)
        say(setting)
        results = [BENCHES[name](server, schedule, say) for name in given.only or BENCHES]
    print(report.page(results, setting=setting))
    if not given.only:
        report.write(results, setting=setting)
    missed = [problem for result in results for problem in result.missed()]
    for problem in missed:
        print(f"MISSED {problem}")
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Waypost beside its peers.")
    parser.add_argument(
        "--only", action="append", choices=sorted(BENCHES), help="these benches; writes no results"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=float, default=1.5, help="seconds")
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
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


def say(words: str) -> None:
    """Progress, as it is made."""
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
