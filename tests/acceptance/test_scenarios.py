"""The scenarios that a durable orchestrator is asked for, each seen over real processes and real HTTP."""

from __future__ import annotations

from pathlib import Path

from tests.acceptance.stand import BOUGHT, Stand, facts, stand
from tests.waiting import until, until_true

UNDONE_AFTER_SHIPPING = ["undone payment.refund", "undone stock.release"]


async def statuses(it: Stand, order: str, path: str) -> list[int | str]:
    """What each try of the message at `path` brought: a status, or why there is none."""
    rows = await (
        await it.conn.execute(
            """
            select coalesce(d.status::text, d.error_code)
              from waypost.delivery d
              join waypost.outbox o using (tenant_id, message_id)
             where o.execution_id = %s
               and o.path = %s
             order by d.attempt
            """,
            (it.started[order], path),
        )
    ).fetchall()
    return [row[0] for row in rows]


async def test_a_sequence_runs_in_its_order(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("order-1")
        [view] = await it.ended("order-1")

        assert await it.at_rest() == []
    assert (view.row.status, it.book().effects_of("order-1")) == (
        "completed",
        [*BOUGHT, "done shipment.create"],
    )
    assert view.output == {"order": "order-1", "charge": "charge-order-1", "tracking": "tracking-order-1"}


async def test_a_service_in_trouble_is_asked_again_with_the_same_bytes_and_acts_once(
    dsn: str, tmp_path: Path
) -> None:
    tries = {
        "busy-1": ["503", "202"],
        "throttled-1": ["429", "202"],
        "broken-1": ["500", "202"],
        "cut-1": ["connection-cut", "202"],
        "silent-1": ["timeout", "202"],
    }
    async with stand(dsn, tmp_path) as it:
        for order in tries:
            await it.order(order)
        views = await it.ended(*tries)

        assert [view.row.status for view in views] == ["completed"] * 5
        assert {order: await statuses(it, order, "charge") for order in tries} == tries
        assert await it.at_rest() == []
    for order in tries:
        first, second = it.book().arrivals_of(order, "payment.charge")
        assert (first.id, first.sha256) == (second.id, second.sha256)
        assert (first.headers["waypost-attempt"], second.headers["waypost-attempt"]) == ("1", "2")
        assert it.book().effects_of(order) == [*BOUGHT, "done shipment.create"]


async def test_a_reply_counts_whatever_its_command_was_answered(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("confused-1")  # the charge is done and replied to, and its request answered 500
        [view] = await it.ended("confused-1")

        assert await it.at_rest() == []
    assert view.row.status == "completed"
    assert it.book().effects_of("confused-1") == [*BOUGHT, "done shipment.create"]
    assert {status for given in it.book().answers.values() for status in given} == {202, 500}


async def test_what_was_done_is_undone_in_reverse_when_a_service_says_no(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("undeliverable-1")  # said in a reply
        await it.order("unprocessable-1")  # said by the status of the answer
        by_reply, by_status = await it.ended("undeliverable-1", "unprocessable-1")

        assert await statuses(it, "unprocessable-1", "create") == ["422"]
        assert await it.at_rest() == []
    for view in (by_reply, by_status):
        assert view.row.status == "compensated"
        assert facts(view, "ended") == [
            "ended reserve", "ended charge", "ended create refused", "ended charge/undo", "ended reserve/undo",
        ]  # fmt: skip
    assert it.book().effects_of("undeliverable-1") == [
        *BOUGHT,
        "refused shipment.create",
        *UNDONE_AFTER_SHIPPING,
    ]
    assert it.book().effects_of("unprocessable-1") == [*BOUGHT, *UNDONE_AFTER_SHIPPING]


async def test_a_charge_that_nobody_answers_for_is_undone_though_it_may_not_have_been(
    dsn: str, tmp_path: Path
) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("deaf-1", flow="hasty")
        [view] = await it.ended("deaf-1")

        assert set(await statuses(it, "deaf-1", "charge")) == {"503"}
        assert await it.at_rest() == []
    [refund] = [effect for effect in it.book().effects if effect.type == "payment.refund"]
    assert view.row.status == "compensated"
    assert facts(view, "ended")[1:] == ["ended charge unknown", "ended charge/undo", "ended reserve/undo"]
    assert (refund.what, refund.known) == ("undone before done", False)


async def test_a_reply_after_the_timeout_changes_nothing_that_was_decided(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("late-1", flow="hasty")
        [view] = await it.ended("late-1")

        assert await it.at_rest() == []
    late = [
        post
        for post in it.book().posts
        if post.causation == it.book().arrivals_of("late-1", "payment.charge")[0].id
    ]
    assert [post.status for post in late] == [202]
    assert view.row.status == "compensated"
    assert facts(view, "ended") == [
        "ended reserve", "ended charge unknown", "ended charge/undo", "ended reserve/undo",
    ]  # fmt: skip
    assert "late charge" in facts(view, "late")
    assert it.book().effects_of("late-1") == [*BOUGHT, *UNDONE_AFTER_SHIPPING]


async def test_a_second_report_gets_the_first_answer_and_moves_nothing(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("twice-1")
        [view] = await it.ended("twice-1")

        until_true(lambda: len(it.book().posts) == 6, what="the second report of each of three replies")
        assert await it.one("select count(*) from waypost.mail") == 3
        assert await it.at_rest() == []
    assert facts(view, "ended") == ["ended reserve", "ended charge", "ended create"]
    for command in {post.causation for post in it.book().posts}:
        first, second = [post for post in it.book().posts if post.causation == command]
        assert (first.status, first.answer, first.inbox) == (202, '{"answer": "mail"}', "")
        assert (second.status, second.answer, second.inbox) == (202, '{"answer": "mail"}', "duplicate")


async def test_another_report_under_the_name_of_the_first_is_refused(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("forged-1")
        [view] = await it.ended("forged-1")

        until_true(lambda: len(it.book().posts) == 6, what="a forged report beside each of three replies")
        assert await it.at_rest() == []
    assert sorted(post.status or 0 for post in it.book().posts) == [202, 202, 202, 409, 409, 409]
    assert view.output["charge"] == "charge-forged-1"


async def test_the_input_decides_which_step_runs(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("order-1", flow="chosen", total=4200)
        await it.order("order-2", flow="chosen", total=0)
        await it.ended("order-1", "order-2")

        assert await it.at_rest() == []
    assert it.book().effects_of("order-1") == ["done payment.charge"]
    assert it.book().effects_of("order-2") == ["done shipment.create"]


async def test_two_steps_run_at_once_and_the_third_after_both(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("abreast-1", flow="abreast")
        until_true(lambda: sorted(effects(it, "abreast-1")) == sorted(BOUGHT), what="both, without a reply")
        it.open_gate()
        [view] = await it.ended("abreast-1")

        assert await it.at_rest() == []
    assert view.row.status == "completed"
    assert effects(it, "abreast-1")[2:] == ["done shipment.create"]
    shipped = [fact.path for fact in view.facts].index("create")
    assert [fact.kind for fact in view.facts[:shipped]].count("ended") == 2


def effects(it: Stand, order: str) -> list[str]:
    return it.book().effects_of(order)


async def test_when_one_of_two_steps_is_refused_the_other_is_undone(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("declined-1", flow="abreast")
        [view] = await it.ended("declined-1")

        assert await it.at_rest() == []
    assert view.row.status == "compensated"
    assert sorted(effects(it, "declined-1")[:2]) == ["done stock.reserve", "refused payment.charge"]
    assert effects(it, "declined-1")[2:] == ["undone stock.release"]


async def test_when_the_tries_of_a_step_are_used_up_the_flow_fails_and_what_was_done_is_undone(
    dsn: str, tmp_path: Path
) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("order-1", flow="jammed")
        [view] = await it.ended("order-1")

        assert await it.at_rest() == []
    assert view.row.status == "compensated"
    assert facts(view, "ended") == [
        "ended reserve", "ended jam failed", "ended jam/undo", "ended reserve/undo",
    ]  # fmt: skip
    assert (tmp_path / "order-1.steps").read_text().split() == ["jam", "jam", "jam", "unjam"]
    assert effects(it, "order-1") == ["done stock.reserve", "undone stock.release"]


async def test_a_flow_waits_for_an_event_and_goes_on_when_it_comes(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("order-1", flow="approved")
        await until(lambda: waits_for_approval(it, "order-1"), what="an order that waits for its approval")
        assert await approve(it, "order-1", by="ann") == (202, "")
        assert await approve(it, "order-1", by="ann") == (202, "duplicate")
        assert await approve(it, "order-1", by="eve") == (409, "")
        [view] = await it.ended("order-1")

        assert await it.one("select count(*) from waypost.mail where type = 'order.approved'") == 1
        assert await it.at_rest() == []
    assert (view.row.status, view.output) == ("completed", "ann")
    assert effects(it, "order-1") == ["done stock.reserve", "done shipment.create"]


async def test_an_event_that_came_first_is_there_when_a_flow_waits_for_it(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        assert await approve(it, "order-1", by="ann") == (202, "")  # nobody knows this order yet
        await it.order("order-1", flow="approved")
        await it.order("abreast-2", flow="approved")
        until_true(lambda: effects(it, "abreast-2") == BOUGHT[:1], what="a reservation, without a reply")
        assert await approve(it, "abreast-2", by="bob") == (202, "")  # it does not wait for it yet
        it.open_gate()
        first, second = await it.ended("order-1", "abreast-2")

        assert await it.at_rest() == []
    assert (first.row.status, first.output) == ("completed", "ann")
    assert (second.row.status, second.output) == ("completed", "bob")


async def waits_for_approval(it: Stand, order: str) -> bool:
    found = await it.waypost("why", str(it.started[order]))
    return found.startswith("awaiting-event: ")


async def approve(it: Stand, order: str, *, by: str) -> tuple[int, str]:
    """Post the approval of an order, always under the same name."""
    return await it.outsider.post(f"approval-{order}", "order.approved", order, {"order": order, "by": by})


CANCEL = ("--by", "ann", "--reason", "the customer called")


async def test_once_a_cancel_is_acknowledged_no_step_begins_and_what_was_done_is_undone(
    dsn: str, tmp_path: Path
) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("unpaid-1", flow="abreast")
        await it.order("unpaid-2")
        for order in ("unpaid-1", "unpaid-2"):
            until_true(lambda order=order: sorted(effects(it, order)) == sorted(BOUGHT), what="a charge")
        it.part("worker").freeze()  # so that the cancel and the reply that it waits for come together
        for order in ("unpaid-1", "unpaid-2"):
            await it.waypost("cancel", str(it.started[order]), *CANCEL)
        it.open_gate()
        await until(lambda: replied(it, 4), what="the replies to both charges, too")
        it.part("worker").thaw()
        views = await it.ended("unpaid-1", "unpaid-2")

        assert await it.at_rest() == []
    assert [view.row.status for view in views] == ["cancelled", "cancelled"]
    for order in ("unpaid-1", "unpaid-2"):
        assert it.book().arrivals_of(order, "shipment.create") == []
        assert sorted(effects(it, order)[2:]) == sorted(UNDONE_AFTER_SHIPPING)
    assert effects(it, "unpaid-2") == [*BOUGHT, *UNDONE_AFTER_SHIPPING]


async def replied(it: Stand, number: int) -> bool:
    """Whether so many replies are mail."""
    return (
        await it.one("select count(*) from waypost.inbox where kind = 'reply' and answer = 'mail'") == number
    )


async def test_a_flow_that_is_not_over_in_its_time_is_stopped_and_undone(dsn: str, tmp_path: Path) -> None:
    async with stand(dsn, tmp_path) as it:
        await it.order("mute-1", flow="bounded")
        await it.order("order-2", flow="bounded")
        late, in_time = await it.ended("mute-1", "order-2")

        assert await it.at_rest() == []
    assert (late.row.status, in_time.row.status) == ("compensated", "completed")
    assert effects(it, "mute-1") == [*BOUGHT, *UNDONE_AFTER_SHIPPING]
    assert effects(it, "order-2") == [*BOUGHT, "done shipment.create"]
