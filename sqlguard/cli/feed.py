"""`journal export` and `journal follow`: the journal for other systems."""

import base64
import hashlib
import hmac
import http.client
import json
import os
import time
import urllib.request
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlsplit

import psycopg
import typer
from psycopg import sql

from sqlguard.cli.common import Dsn, Json, operator
from sqlguard.cli.history import aware, group
from sqlguard.cli.output import err, plain, print_json, print_json_line, print_rows
from sqlguard.errors import NotConfigured
from sqlguard.postgres import feed as feeding
from sqlguard.postgres.journal import filters

#: Seconds between attempts to post: twice as long each time, up to the last.
_FIRST, _LONGEST = 0.5, 60.0
#: Seconds that a receiver may take.
_PATIENCE = 10.0
#: Seconds after which the journal is looked at without a notification.
_LOOK = 5.0
SECRET_VARIABLE = "SQLGUARD_WEBHOOK_SECRET"  # noqa: S105 (its name)


def export(
    *,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent.")] = None,
    table: Annotated[str | None, typer.Option(help="Only statements that wrote to this table.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Only what changed the row with this key.")] = None,
    since: Annotated[datetime | None, typer.Option(help="Not before.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Before.")] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="The changed rows as well, as they were before.")
    ] = False,
    dsn: Dsn = None,
) -> None:
    """
    Print the journal as JSON lines, oldest first, with events, changes and hashes.

    Example: sqlguard journal export --since 2026-01-01 > journal.jsonl
    """
    wanted = filters(task=task, agent=agent, table=table, row=row, since=aware(since), until=aware(until))
    with operator(dsn) as conn:
        for document in feeding.export(conn, wanted, rows=rows):
            print_json_line(document)


def follow(
    name: Annotated[
        str, typer.Argument(help="The feed's name; its place is kept in the database.")
    ] = "default",
    *,
    webhook: Annotated[str | None, typer.Option(help="Post each batch here instead of printing it.")] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="A new feed begins with all there is.")
    ] = False,
    approvals: Annotated[
        bool, typer.Option("--approvals", help="Only plans that need an approval, and what people decided.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Deliver what is there, then end.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Forget the feed.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Show the feeds and how far behind they are.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Follow the journal as CloudEvents: JSON lines, or posted to a webhook. At least once, in each task's order.

    Example: sqlguard journal follow siem --webhook https://siem.example/events

    Posts are signed with SQLGUARD_WEBHOOK_SECRET, where it is set, as standardwebhooks.com says.

    Example: sqlguard journal follow approvers --approvals --webhook https://chat.example/hook
    """
    if webhook is not None and not webhook.startswith(("http://", "https://")):
        raise typer.BadParameter("--webhook is an http:// or https:// address")
    with operator(dsn) as conn:
        feed = feeding.Feed(conn, name, approvals=approvals)
        if list_:
            _list(conn, as_json=as_json)
        elif drop:
            if not feed.drop():
                raise NotConfigured(f"there is no feed `{name}`", hint="see `sqlguard journal follow --list`")
        else:
            if feed.create(from_start=from_start) and not from_start:
                err.print(
                    f"the feed `{name}` is new: it begins with what comes now (`--from-start`: with all there is)",
                    markup=False,
                )
            _run(conn, feed, _print if webhook is None else _poster(webhook), once=once)


def _run(
    conn: psycopg.Connection[Any],
    feed: feeding.Feed,
    to: Callable[[list[dict[str, Any]]], None],
    *,
    once: bool,
) -> None:
    conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(feeding.CHANNEL)))
    while True:
        while feed.deliver(to):
            pass
        if once:
            return
        # A notification says that there is something; one that got lost only delays it.
        for _ in conn.notifies(timeout=_LOOK, stop_after=1):
            pass


def _print(events: list[dict[str, Any]]) -> None:
    for event in events:
        print_json_line(event)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A POST that is redirected would arrive without its body, and wherever the receiver wants us to knock."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _poster(url: str) -> Callable[[list[dict[str, Any]]], None]:
    """Return what posts a batch and does not come back before the receiver has taken it."""
    key = _key(os.environ.pop(SECRET_VARIABLE, ""))
    # The rest of an address is often all that its receiver asks for, and this goes to logs.
    shown = f"{urlsplit(url).scheme}://{urlsplit(url).hostname}/…"

    def post(events: list[dict[str, Any]]) -> None:
        body = json.dumps(events, default=plain, ensure_ascii=False).encode()
        wait = _FIRST
        while (problem := _posted(url, body, key)) is not None:
            err.print(f"not delivered to {shown}: {problem}; again in {wait:g} s", markup=False)
            time.sleep(wait)
            wait = min(wait * 2, _LONGEST)

    return post


def _key(secret: str) -> bytes:
    if not secret.startswith("whsec_"):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise NotConfigured(
            f"{SECRET_VARIABLE} can't be read",
            hint="behind `whsec_` it is base64; any other text is taken as it is",
        ) from None


def signed(key: bytes, body: bytes, at: int) -> dict[str, str]:
    """
    Return the headers by which a receiver knows us, https://www.standardwebhooks.com: an HMAC of all three.

    The id is the body's, so a batch that is posted again has the same one.
    """
    name = f"msg_{hashlib.sha256(body).hexdigest()[:32]}"
    mark = hmac.digest(key, f"{name}.{at}.".encode() + body, "sha256")
    return {
        "webhook-id": name,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{base64.b64encode(mark).decode()}",
    }


def _posted(url: str, body: bytes, key: bytes) -> str | None:
    """Post once; return what went wrong."""
    headers = {"Content-Type": "application/cloudevents-batch+json; charset=UTF-8"}
    if key:
        headers |= signed(key, body, int(time.time()))
    request = urllib.request.Request(url, body, headers)  # noqa: S310 (the scheme was looked at)
    try:
        with _OPENER.open(request, timeout=_PATIENCE):
            return None
    except (OSError, http.client.HTTPException) as fault:
        return f"{type(fault).__name__}: {fault}"


def _list(conn: psycopg.Connection[Any], *, as_json: bool) -> None:
    found = feeding.feeds(conn)
    if as_json:
        print_json({"feeds": found})
    else:
        print_rows(
            ("feed", "delivered", "behind"), [(f["name"], f["delivered_at"], f["behind"]) for f in found]
        )


def register(_: typer.Typer) -> None:
    group.command("export")(export)
    group.command("follow")(follow)
