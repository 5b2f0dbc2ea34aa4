"""SET, RESET and SHOW."""

from collections.abc import Iterator

from sqlguard.functions import FunctionEffect, classify_setting
from sqlguard.policy import setting
from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement

_ALLOW = Finding("session-settings", Effect.ALLOW, "a setting that a session may change")


@rule("session-settings", (Kind.SET, Kind.RESET, Kind.SHOW))
def session_settings(statement: Statement, session: Session, context: Context) -> Iterator[Finding]:
    """
    Lets a session change the settings on a list, within bounds; refuses all others.

    ## Why
    Role, search_path, row security, read-only flags, time-outs, the escape rules of strings and application
    settings that policies read decide what later statements mean and may do.

    ## Finds
        SET ROLE sg_group
        SET row_security = off
        SET statement_timeout = 0
        SET standard_conforming_strings = off
        SET app.tenant = 't2'
        SET search_path = priv

    ## Ignores
        SHOW server_version

    ## Misses
    Extensions' own settings are refused, harmless or not.
    """
    if statement.kind is Kind.SHOW:
        name = statement.subject or ""
        if classify_setting(name).effect is not FunctionEffect.HARMLESS:
            yield Finding(
                "session-settings",
                Effect.APPROVE,
                "the value shows how the server is set up"
                if name != "all"
                else "SHOW ALL shows how the server is set up",
                "show one setting of the session, such as server_version",
            )
        return
    found = setting.of_statement(statement, session, context)
    if found is None:
        yield _ALLOW
    else:
        yield Finding("session-settings", Effect.REFUSE, found.message, found.hint)
