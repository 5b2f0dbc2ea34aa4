"""
The tools and resources as MCP sees them.

A refusal is a tool error: its text says what is wrong, what would pass and the SQLSTATE, and the same is in `_meta`
under `sqlguard/error` for programs. It is not in `structuredContent`, which clients hold against the output schema.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Annotated, Any, Protocol, TypeVar, cast

import anyio
import psycopg
from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION, CallToolResult, TextContent, ToolAnnotations
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import Field, JsonValue

from sqlguard.connection import GuardedConnection
from sqlguard.errors import SqlguardError
from sqlguard.mcp_server import describe, tools
from sqlguard.mcp_server.models import (
    Preview,
    QueryResult,
    Status,
    TableDescription,
    TableList,
    Ticket,
    UndoResult,
    WriteResult,
)
from sqlguard.mcp_server.sessions import Door, Session, Sessions

ERROR_META = "sqlguard/error"
#: Sessions, and so tasks, that one process opens at once.
MOST_SESSIONS = 100
_STATE = "sqlguard"
_INSTRUCTIONS = """\
SQL on PostgreSQL, guarded. Read the resource sqlguard://policy, or call list_tables and describe_table, before you \
write SQL. Call preview before any write that you are not sure of: it reports every row that would change, cascades \
included. Then call write with a reason. A refusal says what would pass: change the statement as its hint says. \
SG001 means that a person has to approve; no tool here can: tell the user the plan's number, look at ticket, and when \
it is approved call commit_plan. undo takes back what this task did."""

Sql = Annotated[str, Field(description="One statement of PostgreSQL, with $1, $2 … for params.")]
Params = Annotated[
    list[JsonValue] | None, Field(description="Values for $1, $2 …; a list is an array, an object is json.")
]
MaxRows = Annotated[int, Field(ge=1, le=5000, description="Rows to pass on; the rest is counted.")]
Reason = Annotated[
    str, Field(min_length=1, max_length=2000, description="Why, for the journal and the owner.")
]
Confidence = Annotated[
    float | None, Field(ge=0, le=1, description="How sure you are, from 0 to 1; low ones need an approval.")
]
Key = Annotated[
    str,
    Field(
        max_length=200,
        description="A key of your choice for this write. Sent again with the same key, it is answered, not repeated.",
    ),
]
Action = Annotated[
    int | None, Field(description="The number that write answered with; null: the whole task.")
]

PlanNumber = Annotated[int, Field(description="The number that preview or an SG001 refusal gave.")]
T = TypeVar("T")
_request: ContextVar[ServerRequestContext[Any, Any]] = ContextVar("sqlguard_mcp_request")


class Run(Protocol):
    """Does a job with the guarded connection of the client that asks."""

    async def __call__(self, job: Callable[[GuardedConnection], T]) -> T: ...


class Guard:
    """An MCP server whose every session is a task; `shared`: all of its clients work as one."""

    def __init__(self, door: Door, *, shared: bool, most_sessions: int = MOST_SESSIONS) -> None:
        self.most_sessions = most_sessions
        self._sessions = Sessions(door, most_sessions)
        self._shared = self._sessions.make(None) if shared or door.own_task else None
        self.server: MCPServer[None] = MCPServer(
            "sqlguard",
            title="sqlguard",
            description="Guarded SQL on PostgreSQL",
            instructions=_INSTRUCTIONS,
            version=version("sqlguard-pg"),
            lifespan=self._run,
            middleware=[self._remember],
            log_level="WARNING",
        )
        add_tools(self.server, self._tool)
        add_resources(self.server, self._resource)

    async def _tool(self, job: Callable[[GuardedConnection], T]) -> T:
        """Do *job* for a tool; a refusal becomes a tool error, which the SDK takes in place of any answer."""
        try:
            return await self._session().call(job)
        except (SqlguardError, psycopg.Error) as fault:
            return cast("T", failed(fault))

    async def _resource(self, job: Callable[[GuardedConnection], T]) -> T:
        try:
            return await self._session().call(job)
        except (SqlguardError, psycopg.Error) as fault:
            raise ResourceError(in_words(as_dict(fault))) from fault

    @asynccontextmanager
    async def _run(self, _: MCPServer[None]) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(self._sessions.watch)
            try:
                yield
            finally:
                await self._sessions.close()
                group.cancel_scope.cancel()

    async def _remember(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Let tools and resources know whose request they serve; see to it that there is a session."""
        if self._shared is None and ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            # That protocol knows no sessions, and a task is a session. Clients fall back to the handshake.
            raise MCPError(
                code=UNSUPPORTED_PROTOCOL_VERSION,
                message="this server gives every session a task of its own, so it needs the handshake",
                data={"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": ctx.protocol_version},
            )
        token = _request.set(ctx)
        try:
            return await call_next(ctx)
        finally:
            _request.reset(token)

    def _session(self) -> Session:
        if self._shared is not None:
            return self._shared
        session = _request.get().session
        # The SDK names `Connection.state` and `exit_stack` as the place for this, and has no public way there.
        connection: Connection = session._connection  # noqa: SLF001
        found: Session | None = connection.state.get(_STATE)
        if found is None:
            found = connection.state[_STATE] = self._sessions.make(_client(session))
            connection.exit_stack.push_async_callback(self._sessions.end, found)
        return found


def _client(session: ServerSession) -> str | None:
    params = session.client_params
    return None if params is None else f"{params.client_info.name} {params.client_info.version}"[:200]


def as_dict(fault: SqlguardError | psycopg.Error) -> dict[str, Any]:
    """Return what is wrong and what to do, with the fields of every `--json` command."""
    if isinstance(fault, SqlguardError):
        return fault.as_dict()
    return {
        "error": fault.diag.message_primary or str(fault).strip(),
        "sqlstate": fault.sqlstate,
        "detail": fault.diag.message_detail,
        "hint": fault.diag.message_hint,
    }


def in_words(document: dict[str, Any]) -> str:
    lines = [f"{document['error']} ({document['sqlstate'] or 'no SQLSTATE'})"]
    lines += [f"{name}: {document[name]}" for name in ("detail", "hint") if document[name]]
    return "\n".join(lines)


def failed(fault: SqlguardError | psycopg.Error) -> CallToolResult:
    document = as_dict(fault)
    return CallToolResult(
        content=[TextContent(type="text", text=in_words(document))],
        is_error=True,
        _meta={ERROR_META: document},
    )


def add_tools(server: MCPServer[None], run: Run) -> None:  # long: the table of tools
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)

    @server.tool(title="List tables", annotations=reads)
    async def list_tables(
        name_contains: Annotated[str, Field(description="Only tables with this in their name.")] = "",
    ) -> TableList:
        """List the tables that the policy shows, with what may be done to each."""
        return await run(lambda db: describe.list_tables(db.context, name_contains))

    @server.tool(title="Describe a table", annotations=reads)
    async def describe_table(
        table: Annotated[str, Field(description="`schema.name`, or the name along the search_path.")],
    ) -> TableDescription:
        """Describe a table: columns with types and rights, keys, who refers to it, row scope, caps."""
        return await run(lambda db: describe.describe(db.context, table))

    @server.tool(title="Read", annotations=reads)
    async def query(sql: Sql, params: Params = None, max_rows: MaxRows = 200) -> QueryResult:
        """Run one reading statement (SELECT, VALUES, EXPLAIN, SHOW), read-only. Long results are cut and counted."""
        return await run(lambda db: tools.query(db, sql, params or [], max_rows))

    @server.tool(title="Preview a write", annotations=reads)
    async def preview(sql: Sql, params: Params = None) -> Preview:
        """Run a write, report every row it would change per table (cascades and triggers too), and roll it back."""
        return await run(lambda db: tools.preview(db, sql, params or []))

    @server.tool(
        title="Write",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=False
        ),
    )
    async def write(
        sql: Sql,
        reason: Reason,
        params: Params = None,
        confidence: Confidence = None,
        idempotency_key: Key = "",
    ) -> WriteResult:
        """Run one INSERT, UPDATE, DELETE or MERGE, journaled with your reason; it can be undone by its action."""
        return await run(
            lambda db: tools.write(
                db,
                sql,
                params or [],
                reason=reason,
                confidence=confidence,
                idempotency_key=idempotency_key or None,
            )
        )

    @server.tool(
        title="Commit an approved plan",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def commit_plan(plan: PlanNumber) -> WriteResult:
        """Carry out a plan that a person has approved; if it would change other rows by now, nothing happens."""
        return await run(lambda db: tools.commit_plan(db, plan))

    @server.tool(title="State of a plan", annotations=reads)
    async def ticket(plan: PlanNumber) -> Ticket:
        """Look whether a plan of this agent is approved, by whom or why not, and what it would do."""
        return await run(lambda db: tools.ticket(db, plan))

    @server.tool(
        title="Undo",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def undo(
        action: Action = None,
        preview: Annotated[bool, Field(description="Report only.")] = False,  # noqa: FBT002 (named by the client)
    ) -> UndoResult:
        """Take back one action of this task, or all of them, newest first; rows changed by others since stop it."""
        return await run(lambda db: tools.undo(db, action, only_preview=preview))

    @server.tool(title="This task", annotations=reads)
    async def status() -> Status:
        """Tell this session's task: agent, policy, purpose, and how long it lives."""
        return await run(tools.status)


def add_resources(server: MCPServer[None], run: Run) -> None:
    @server.resource("sqlguard://policy", title="Policy in words", mime_type="text/markdown")
    async def policy() -> str:
        """What this task may do, and what needs a person."""
        return await run(lambda db: describe.policy_in_words(db.context))

    @server.resource("sqlguard://schema", title="Schema in words", mime_type="text/markdown")
    async def schema() -> str:
        """The tables that the policy shows, with columns and keys."""
        return await run(lambda db: describe.schema_in_words(db.context))

    @server.resource("sqlguard://table/{name}", title="One table", mime_type="application/json")
    async def table(name: str) -> str:
        """One table as describe_table has it."""
        return await run(lambda db: describe.describe(db.context, name).model_dump_json())
