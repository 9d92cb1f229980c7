"""What came and moved nothing, and contracts, as the command shows them: also what strangers wrote to harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import psycopg

from orchestrator.cli.output import Exit
from tests.cli.conftest import Run

HOSTILE: Final = "x\x1b[2J\x9b\u202ey\nz\u2028<script>"
SEEN: Final = r"x\x1b[2J\x9b\u202ey\nz\u2028<script>"


def insert(dsn: str) -> None:
    """Something kept apart, an event that nobody waited for in time, a reply to nothing, and a wait: all hostile."""
    reply = {"specversion": "1.0", "id": "reply", "source": "/s", "type": "t", "causationid": "\u202e\u2028x"}
    body = json.dumps(reply)
    named = {"hostile": HOSTILE, "body": body.encode() + b"\xff\x1b]0;x\x07"}
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            """
            insert into waypost.quarantine
                   (tenant_id, sender, reason, detail, source, event_id, type, key, webhook_id, headers, body, digest)
            values (1, %(hostile)s, 'mapping', %(hostile)s, %(hostile)s, %(hostile)s, %(hostile)s, %(hostile)s,
                    %(hostile)s, jsonb_build_object(%(hostile)s::text, %(hostile)s::text), %(body)s, '\\x01')
            """,
            named,
        )
        conn.execute(
            """
            insert into waypost.inbox
                   (tenant_id, kind, sender, source, event_id, webhook_id, type, key, digest, data, body, answer,
                    shelf_until, received_at)
            values (1, 'event', %(hostile)s, %(hostile)s, %(hostile)s, null, %(hostile)s, %(hostile)s, '\\x01',
                    to_jsonb(%(hostile)s::text), %(body)s, 'event', '2026-01-01', now()),
                   (1, 'reply', %(hostile)s, %(hostile)s, 'reply', null, %(hostile)s, %(hostile)s, '\\x01',
                    null, %(plain)s, 'unmatched', null, now())
            """,
            named | {"plain": body.encode()},
        )
        conn.execute(
            """
            insert into waypost.contract (tenant_id, type, dataschema, schema)
            values (1, %(hostile)s, %(hostile)s, 'true')
            """,
            named,
        )


def visible(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def test_hostile_values_reach_no_terminal_as_they_are(run: Run, dsn: str) -> None:
    insert(dsn)
    table, rows = run("inbox", "list").out, run("inbox", "list", "-o", "json").json

    assert len(table.splitlines()) == 4
    assert table.count(SEEN) >= 9
    assert {row["reason"] for row in rows} == {"mapping", "orphaned", "unmatched"}
    assert {row["type"] for row in rows} == {HOSTILE}
    said = [table, run("inbox", "list", "--reason", "mapping").out, run("contract", "list").out]
    for row in rows:
        for verb in ("show", "explain"):
            text, document = run("inbox", verb, row["id"]), run("inbox", verb, row["id"], "-o", "json")
            assert (text.code, document.code) == (Exit.OK, Exit.OK), (text.err, document.err)
            assert document.json["explanation"]
            said += [text.out, document.out]
    assert SEEN in run("inbox", "show", "q1").out
    assert "redrive q1 --by NAME" in run("inbox", "explain", "q1").out
    assert all(visible(text) for text in said)


def test_a_redrive_says_what_became_of_it_and_what_is_in_the_way(run: Run, dsn: str) -> None:
    insert(dsn)
    [orphan] = [row["id"] for row in run("inbox", "list", "--reason", "orphaned", "-o", "json").json]

    gone = run("inbox", "redrive", "q1", "--by", "ada")
    nothing = run("inbox", "redrive", f"q{HOSTILE}", "--by", "ada")
    done = run("inbox", "redrive", orphan, "--by", "ada")
    again = run("inbox", "redrive", orphan, "--by", "ada")

    assert (gone.code, nothing.code, done.code, again.code) == (
        Exit.REFUSED,
        Exit.USAGE,
        Exit.OK,
        Exit.REFUSED,
    )
    assert "is not registered any more" in gone.err
    assert "is offered for a week more" in done.err
    assert "found mail" in again.err
    assert [said.err for said in (gone, nothing, done, again) if not visible(said.out + said.err)] == []


def test_contracts_are_added_listed_and_removed_and_what_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    good, bad, none = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "none.json"
    good.write_text('{"type": "object"}')
    bad.write_text('{"\\u001b[2J": 1}')
    none.write_text("{")

    assert run("contract", "add", str(good), "--type", "payout.made").code == Exit.OK
    [row] = run("contract", "list", "-o", "json").json
    refused = [
        run("contract", "add", str(bad), "--type", "payout.made"),
        run("contract", "add", str(none), "--type", "payout.made"),
        run("contract", "add", str(tmp_path / "absent.json"), "--type", "payout.made"),
        run("contract", "add", str(good)),
        run("contract", "add", str(good), "--type", HOSTILE),
        run("contract", "remove", "payout.lost"),
        run("contract", "remove", "payout.made", "--dataschema", HOSTILE),
    ]

    assert (row["type"], row["dataschema"], row["schema"]) == ("payout.made", "", {"type": "object"})
    assert all(said.code for said in refused)
    assert all(said.err and visible(said.out + said.err) for said in refused)
    assert run("contract", "list", "-o", "json").json == [row]
    assert run("contract", "remove", "payout.made").code == Exit.OK
    assert run("contract", "list", "-o", "json").json == []
