"""
Every error that sqlguard raises on purpose.

    SqlguardError
    ├── Refused                SG002  the policy or the guard said no
    │   ├── NotUnderstood      SG007  the text, or a part of it, could not be judged
    │   └── Frozen             SG005  writes are frozen for now
    ├── ApprovalRequired       SG001  a person has to say yes first
    ├── Drift                  SG003  the rows are no longer those that were approved
    ├── TaskEnded              SG004  the task has ended, expired or been revoked
    ├── CapExceeded            SG006  more rows, or more work, than the task may touch
    ├── UndoConflict           SG008  somebody changed the row after the agent did
    ├── NotConfigured          58000  something has to be set up or repaired by the operator first
    │   ├── BadAddress         58000  a connection string can't be read
    │   ├── DatabaseUnavailable 08001 PostgreSQL can't be reached or refused the login
    │   ├── PolicyError        58000  a policy file is missing, unreadable or names what is not there
    │   └── GuardError         58000  a table can't be guarded the way it was asked
    └── ProtocolViolation      08P01  the peer broke the wire protocol

Messages are lower-case without a final period and put names in backticks; the hint says what to do.
Errors are raised by the layer that knows and turned into an ErrorResponse, an exit status or JSON only
at the rim. They never hold row values or secrets.
"""

from collections.abc import Sequence


class SqlguardError(Exception):
    """The root of the tree; *message* says what is wrong, *hint* what to do about it."""

    sqlstate = "XX000"
    #: Exit status of the command line: 1 refused or conflict, 2 usage, 3 approval required.
    exit_status = 1
    default_hint: str | None = None
    #: Character of the statement that it is about, from 1; 0 when there is none.
    position = 0

    def __init__(
        self,
        message: str,
        *,
        detail: str | None = None,
        hint: str | None = None,
        rules: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint if hint is not None else self.default_hint
        #: For the journal and for `sqlguard check --why`, never for the agent (DESIGN section 2).
        self.rules = tuple(rules)

    def as_dict(self) -> dict[str, object]:
        """Return the error as the JSON that every `--json` command prints."""
        return {
            "error": self.message,
            "sqlstate": self.sqlstate,
            "detail": self.detail,
            "hint": self.hint,
        }


class Refused(SqlguardError):
    sqlstate = "SG002"


class NotUnderstood(Refused):
    sqlstate = "SG007"
    default_hint = "send one plain statement that names its tables and columns"


class Frozen(Refused):
    sqlstate = "SG005"
    default_hint = "reads go on; send the write again when the freeze has ended"


class ApprovalRequired(SqlguardError):
    sqlstate = "SG001"
    exit_status = 3
    default_hint = "ask the operator: a person has to run it or widen the policy"


class Drift(SqlguardError):
    sqlstate = "SG003"
    default_hint = "preview the statement again and have the new preview approved"


class TaskEnded(SqlguardError):
    sqlstate = "SG004"
    default_hint = "ask for a new task"


class CapExceeded(SqlguardError):
    sqlstate = "SG006"
    default_hint = "narrow the WHERE to fewer rows"


class UndoConflict(SqlguardError):
    sqlstate = "SG008"
    default_hint = "look at `sqlguard undo --preview`, then choose `--on-conflict skip` or `force`"


class NotConfigured(SqlguardError):
    sqlstate = "58000"


class BadAddress(NotConfigured):
    exit_status = 2


class DatabaseUnavailable(NotConfigured):
    sqlstate = "08001"
    default_hint = "check that PostgreSQL is running and that --dsn (or SQLGUARD_DSN) points to it"


class PolicyError(NotConfigured):
    exit_status = 2


class GuardError(NotConfigured):
    pass


class ProtocolViolation(SqlguardError):
    sqlstate = "08P01"
    default_hint = "use a PostgreSQL client that speaks protocol 3.0 to 3.2"
