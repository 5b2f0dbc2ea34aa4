"""
The MCP door: tools and resources for an agent, on the same path as every other door.

The one idea: a client's session is a task. Its tools call `sqlguard.connection.GuardedConnection`, so a statement is
judged, journaled, capped and undone exactly as through the proxy; there is no second way to the database here. No
tool approves anything: that takes a person with a login of their own.

    server     the tools as MCP sees them, stdio and streamable HTTP
    tools      what each tool does with a guarded connection
    sessions   a task per client session: opening it, one statement at a time, cancelling, its end
    describe   what the policy shows of the schema, as data and in words
    models     the shape of every answer
    values     PostgreSQL's values as JSON, cut where they are long
"""
