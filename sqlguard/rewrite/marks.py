"""
What marks a row as deleted: the one place where these words are written, for the splice and for the proof.
"""

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT

#: `statement_timestamp()` and nothing else: the row policies let a statement see the rows that it marked.
NOW = "pg_catalog.statement_timestamp()"
AGENT = "(SELECT sqlguard.agent())"
ASSIGNMENTS = f"{DELETED_AT} = {NOW}, {DELETED_BY_AGENT} = {AGENT}"
#: The same as a statement, for the proof to compare with.
UPDATE = f"UPDATE t SET {ASSIGNMENTS}"  # noqa: S608 - constants of ours, parsed and never run
