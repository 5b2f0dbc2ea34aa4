"""
The story that `sqlguard demo` tells. Each chapter runs real statements through a real proxy and then asks the
database, as its owner, whether what was told is true; the first chapter that isn't ends the demo.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from rich.console import Console
from rich.markup import escape

Row = tuple[Any, ...]


class NotSeen(Exception):
    """A chapter's claim was not found in the database."""


@dataclass
class Stage:
    """What the chapters act on. `task` opens a task and returns its JSON; `undo` takes a task back."""

    owner: psycopg.Connection[Any]
    task: Callable[[str], dict[str, Any]]
    undo: Callable[[str], dict[str, Any]]
    console: Console
    owner_dsn: str = ""
    opened: dict[str, Any] = field(default_factory=dict)

    def see(self, claim: str, sql: str, expected: object) -> None:
        """Ask the owner's connection and print the claim only if it is so."""
        row = self.owner.execute(sql.encode()).fetchone()
        found = row[0] if row and len(row) == 1 else row
        if found != expected:
            raise NotSeen(f"{claim}: expected {expected!r}, found {found!r}")
        self.console.print(f"  [green]✓[/] {escape(claim)}")

    def say(self, sql: str, answer: str) -> None:
        self.console.print(f"  [cyan]agent>[/] {escape(sql)}")
        for line in answer.splitlines():
            self.console.print(f"         {escape(line)}", style="dim")


def heading(stage: Stage, number: int, text: str) -> None:
    stage.console.print(f"\n[bold]{number}. {escape(text)}[/]")


def tell(stage: Stage) -> None:
    """Run every chapter in order; raises NotSeen."""
    start = fingerprint(stage.owner)
    stage.opened = stage.task("15min")
    with psycopg.connect(stage.opened["dsn"], autocommit=True) as agent:
        deletes(stage, agent)
        previews(stage, agent)
        refusals(stage, agent)
    undoes(stage, start)
    expires(stage)


def deletes(stage: Stage, agent: psycopg.Connection[Any]) -> None:
    heading(stage, 1, "A DELETE becomes a soft delete, and what hangs on the row goes with it")
    sql = "DELETE FROM customers WHERE id = 42 RETURNING id, name"
    cursor = agent.execute(sql)
    stage.say(sql, f"{cursor.fetchall()}  {cursor.statusmessage}")
    if cursor.statusmessage != "DELETE 1":
        raise NotSeen(f"the agent's command tag was {cursor.statusmessage}")
    sql = "SELECT count(*) FROM orders WHERE customer_id = 42"
    count = agent.execute(sql).fetchone()
    stage.say(sql, f"{count[0] if count else '?'}")
    if count != (0,):
        raise NotSeen(f"the agent still sees {count} orders")
    stage.see(
        "the owner still has the customer, marked with who and when",
        "SELECT deleted_by_agent FROM customers WHERE id = 42 AND deleted_at IS NOT NULL",
        "demo-agent",
    )
    stage.see(
        "and all 4 orders of that customer, marked as well",
        "SELECT count(*) FROM orders WHERE customer_id = 42 AND deleted_at IS NOT NULL",
        4,
    )


def previews(stage: Stage, agent: psycopg.Connection[Any]) -> None:
    heading(stage, 2, "A preview counts every row, cascades included, and changes nothing")
    before = fingerprint(stage.owner)
    reports: list[str] = []
    agent.add_notice_handler(lambda notice: reports.append(notice.message_primary or ""))
    agent.execute("SET sqlguard.dry_run = on")
    sql = "DELETE FROM customers WHERE id BETWEEN 100 AND 104"
    tag = agent.execute(sql).statusmessage
    agent.execute("SET sqlguard.dry_run = off")
    stage.say(sql, "\n".join([f"{tag}  (dry run)", *reports]))
    if not any("public.orders" in r and "public.items" in r for r in reports):
        raise NotSeen(f"the preview did not report the cascade: {reports}")
    if fingerprint(stage.owner) != before:
        raise NotSeen("the preview changed something")
    stage.console.print("  [green]✓[/] every table is byte for byte as before")


def refusals(stage: Stage, agent: psycopg.Connection[Any]) -> None:
    heading(stage, 3, "What can't be taken back, or was not meant, is refused with a hint")
    before = fingerprint(stage.owner)
    for sql in ("DROP TABLE orders", "UPDATE orders SET status = 'cancelled' WHERE id = id"):
        try:
            agent.execute(sql.encode())
        except psycopg.Error as fault:
            stage.say(
                sql, f"ERROR {fault.sqlstate}: {fault.diag.message_primary}\nHINT: {fault.diag.message_hint}"
            )
            if not (fault.sqlstate or "").startswith("SG") or not fault.diag.message_hint:
                raise NotSeen(f"`{sql}` failed, but not by the guard: {fault}") from None
        else:
            raise NotSeen(f"`{sql}` went through")
    if fingerprint(stage.owner) != before:
        raise NotSeen("a refused statement changed something")
    stage.console.print("  [green]✓[/] nothing changed")


def undoes(stage: Stage, start: Row) -> None:
    heading(stage, 4, "The whole task is undone, from the journal, in reverse order")
    sql = f"sqlguard undo --task {stage.opened['task']}"
    report = stage.undo(stage.opened["task"])
    tables = ", ".join(f"{t['rows']} in {t['table']}" for t in report["tables"])
    stage.console.print(f"  [cyan]owner>[/] {sql}\n         [dim]rows restored: {escape(tables)}[/]")
    if fingerprint(stage.owner) != start:
        raise NotSeen("the tables are not as they were before the task")
    stage.console.print("  [green]✓[/] customers, orders and items are byte for byte as before the task")


def expires(stage: Stage) -> None:
    heading(stage, 5, "The credential ends by itself")
    short = stage.task("2s")
    with psycopg.connect(short["dsn"], autocommit=True) as agent:
        agent.execute("SELECT 1")
        time.sleep(4.0)
        try:
            agent.execute("SELECT 1")
        except psycopg.Error as fault:
            stage.say("SELECT 1", f"after 2 s TTL: {str(fault).strip().splitlines()[0]}")
        else:
            raise NotSeen("an open session outlived its task")
    for name in ("dsn", "direct_dsn"):
        try:
            psycopg.connect(short[name]).close()
        except psycopg.OperationalError:
            continue
        raise NotSeen(f"the {name} still logs in after the TTL")
    stage.see(
        "its login role is gone from the database",
        f"SELECT count(*) FROM pg_roles WHERE rolname = '{short['role']}'",  # noqa: S608 (our own name)
        0,
    )


def fingerprint(owner: psycopg.Connection[Any]) -> Row:
    """Return a digest of every row of the shop, bookkeeping columns included."""
    row = owner.execute(
        "SELECT (SELECT md5(string_agg(t::text, E'\\n' ORDER BY t.id)) FROM customers t),"
        " (SELECT md5(string_agg(t::text, E'\\n' ORDER BY t.id)) FROM staff t),"
        " (SELECT md5(string_agg(t::text, E'\\n' ORDER BY t.id)) FROM products t),"
        " (SELECT md5(string_agg(t::text, E'\\n' ORDER BY t.id)) FROM orders t),"
        " (SELECT md5(string_agg(t::text, E'\\n' ORDER BY t.id)) FROM items t)"
    ).fetchone()
    assert row is not None  # noqa: S101 (an aggregate always gives a row)
    return tuple(row)
