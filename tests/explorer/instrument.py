"""The project's functions, with a gate at each of their stops.

The scripts say `-- stop: rows locked` where another transaction may cut in. Here each such comment becomes a call, so
that a session of the explorer announces that it is there and waits until it is let on. Everybody else passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, LiteralString

import psycopg

from migrations import runner
from migrations.runner import Migration

STOP: Final = re.compile(
    r"^(?P<branch> *end if;\n)?(?P<indent> *)-- stop: (?P<name>.*)$"
    r"|^create (?:or replace )?function waypost\.(?P<function>\w+)\(",
    re.MULTILINE,
)
NAME: Final = re.compile(r"[a-z][a-z ]*[a-z]")
CHECK: Final = re.compile(r"\bif\b(?:(?!\bend if;).)*?\braise exception\b.*?\bend if;", re.DOTALL)
COMMENT: Final = re.compile(r"--.*")

GATE_CLASS: Final = 7_000
"""Of the advisory locks that are gates, as in `explorer.stop`. Locks of two integers are apart from those of one, such
as event keys.
"""

GATES: Final[LiteralString] = """
    create schema explorer;

    -- Says that the session is at a stop, and waits for its next gate. A session is one of the explorer's when its
    -- setting `explorer.session` says so. The numbers come from sequences, which a rollback does not put back.
    create function explorer.stop(name text) returns void language plpgsql as $$
    declare
        v_session text := current_setting('explorer.session', true);
        v_gate    int;
    begin
        if v_session is null or v_session = '' then
            return;
        end if;
        v_gate := nextval(('explorer.gate_' || v_session)::regclass);
        raise notice 'stop % %', v_gate, name;
        perform pg_advisory_lock(7000 + v_session::int, v_gate);
        perform pg_advisory_unlock(7000 + v_session::int, v_gate);
    end $$;

    create sequence explorer.gate_0;
    create sequence explorer.gate_1;
    create sequence explorer.gate_2;
"""


def instrumented(migrations: Sequence[Migration] | None = None) -> list[Migration]:
    """The project's scripts with their stops as gates; the gates themselves come with the first."""
    first, *others = runner.discover() if migrations is None else migrations
    return [
        replace(first, sql=first.sql + GATES),
        *(replace(script, sql=with_gates(script.sql)) for script in others),
    ]


def with_gates(script: str) -> str:
    """`script` with each of its stops as a call, named after its function: `settle: rows locked`.

    A stop after a branch goes into it when there is nothing else since the last stop: what is passed by does nothing
    that another transaction could come before or after.
    """
    function, since = "", 0

    def as_call(found: re.Match[str]) -> str:
        nonlocal function, since
        if found["function"] is not None:
            function, since = found["function"], max(found.end(), script.find("begin\n", found.end()))
            return found[0]
        name = found["name"]
        assert NAME.fullmatch(name), f"a stop has a name of a few small words, not {name!r}"
        assert function, f"the stop {name!r} is in no function"
        branch, call = found["branch"] or "", f"perform explorer.stop('{function}: {name}');"
        alone = is_one_branch(script[since : found.start()] + branch)
        since = found.end()
        return (
            f"    {found['indent']}{call}\n{branch.rstrip()}" if alone else f"{branch}{found['indent']}{call}"
        )

    return STOP.sub(as_call, script)


def is_one_branch(statements: str) -> bool:
    """Whether these are one `if` without another in it, and nothing else but comments and checks that raise."""
    left = CHECK.sub("", COMMENT.sub("", statements)).removeprefix("begin").strip()
    return left.startswith("if ") and left.endswith("end if;") and left.count("end if;") == 1


STOPS: Final[LiteralString] = r"""
    select regexp_matches(p.prosrc, 'explorer\.stop\(''([a-z_]+: [a-z ]+)''\)', 'g')
      from pg_proc p
     where p.pronamespace = 'waypost'::regnamespace
"""


def stops(conn: psycopg.Connection[Any]) -> set[str]:
    """The stops that the functions of this database have."""
    return {name for ((name,),) in conn.execute(STOPS).fetchall()}
