"""
What a session remembers that a roll-back takes back: its settings, cursors and temporary tables.

It mirrors PostgreSQL: SET lasts to the end of the session unless its transaction is rolled back, SET LOCAL to
the end of the transaction, both no longer than a savepoint that is rolled back to. Prepared statements stay.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from sqlguard import annotation
from sqlguard import gate as gates
from sqlguard.annotation import Annotation
from sqlguard.plan import Decision
from sqlguard.statement.kinds import PARAMETERS
from sqlguard.statement.model import Kind, Session, Statement
from sqlguard.statement.walk import SETTER

_DRY_RUN = "sqlguard.dry_run"
_OWN = "sqlguard."
#: What these run is run later, by EXECUTE or FETCH.
_PUT_OFF = (Kind.PREPARE, Kind.DECLARE)


@dataclass(frozen=True, slots=True)
class Settings:
    """`said` is what annotates statements that say nothing themselves."""

    dry_run: bool = False
    said: Annotation = field(default_factory=Annotation)

    def having(self, name: str, value: str | None) -> "Settings":
        """Return these settings with one of ours set; with None it goes back to where the session began."""
        if name == _DRY_RUN:
            return replace(self, dry_run=is_on(value))
        return replace(self, said=annotation.with_field(self.said, name.removeprefix(_OWN), value))


@dataclass(frozen=True, slots=True)
class _Moment:
    state: Session
    now: Settings
    #: What stays when the transaction commits: `now` without SET LOCAL.
    lasting: Settings
    #: Actions of the transaction so far.
    actions: int = 0
    texts: Mapping[str, str] = field(default_factory=dict)


class Memory:
    """`state` is what statements are judged by, `settings` what our own settings are."""

    def __init__(self, state: Session) -> None:
        self.state = state
        self.settings = Settings()
        self._lasting = self.settings
        self._first = self.settings
        #: What the session has SET, by name, for good; the statements as they were sent.
        self.texts: Mapping[str, str] = {}
        self._begin: _Moment | None = None
        self._savepoints: list[tuple[str, _Moment]] = []
        #: A transaction is open, the client's or an implicit one.
        self.is_open = False

    def start_with(self, name: str, value: str) -> None:
        """Take a setting that came with the start of the session: RESET goes back to it."""
        if name.startswith(_OWN):
            self.settings = self._lasting = self._first = self.settings.having(name, value)

    def begin(self) -> None:
        """A transaction has begun, the client's or an implicit one."""
        if self._begin is None:
            self._begin = self._moment()
            self.is_open = True

    def end(self, *, committed: bool, previewed: bool = False) -> None:
        """The transaction is over; what was *previewed* looks committed to the client, but its tables are gone."""
        begin, self._begin, self.is_open = self._begin, None, False
        self._savepoints.clear()
        if self.state.cursors:
            self.state = self.state.after(cursors={})
        if begin is None:
            return
        if committed:
            self.settings = self._lasting
        else:
            self._go_back(begin)
        state = begin.state if previewed else self.state
        self.state = state.after(cursors={}, prepared=self.state.prepared)

    def follow(self, decision: Decision, actions: int) -> int:
        """
        *decision* was carried out without an error, in a transaction with so many *actions*.

        Return how many of them still stand.
        """
        statement = decision.statement
        name = statement.subject or ""
        match statement.kind:
            case Kind.SAVEPOINT:
                self._savepoints.append((name, self._moment(actions)))
            case Kind.ROLLBACK_TO:
                actions = self._roll_back_to(name, actions)
            case Kind.RELEASE:
                del self._savepoints[self._find(name) :]
            case Kind.DISCARD:
                self._discard(decision)
            case _:
                self.state = gates.advance(self.state, decision)
        self._note(decision)
        for setting, value, is_local in _settings_of(statement):
            self._set(setting, value, is_local=is_local)
        return actions

    def prepared(self, name: str, decision: Decision, types: tuple[int, ...] = ()) -> None:
        """The protocol has prepared *name*, with parameters of *types*: SQL's EXECUTE knows it too."""
        details = {**decision.statement.details, "execute_tag": decision.tag, PARAMETERS: types}
        statement = replace(decision.statement, details=details)
        self.state = self.state.after(prepared={**self.state.prepared, name: statement})

    def deallocated(self, name: str) -> None:
        if name in self.state.prepared:
            kept = {key: value for key, value in self.state.prepared.items() if key != name}
            self.state = self.state.after(prepared=kept)

    def opened(self, name: str, statement: Statement | None) -> None:
        """The protocol has made a portal: SQL's FETCH and MOVE know it too if it is of *statement*, a read."""
        self.closed(name)
        if statement is not None:
            self.state = self.state.after(cursors={**self.state.cursors, name: statement})

    def closed(self, name: str) -> None:
        if name in self.state.cursors:
            kept = {key: value for key, value in self.state.cursors.items() if key != name}
            self.state = self.state.after(cursors=kept)

    # --- parts

    def _moment(self, actions: int = 0) -> _Moment:
        return _Moment(self.state, self.settings, self._lasting, actions, self.texts)

    def _note(self, decision: Decision) -> None:
        """Keep what SET has set until RESET or DISCARD ALL, for a server connection that must be made like this one."""
        statement = decision.statement
        name = statement.subject or ""
        if statement.kind is Kind.SET and name and not statement.details.get("local"):
            self.texts = {**{n: t for n, t in self.texts.items() if n != name}, name: decision.text}
        elif statement.kind is Kind.RESET and name:
            self.texts = {n: t for n, t in self.texts.items() if n != name}
        elif statement.kind is Kind.RESET or statement.details.get("target") == "DISCARD_ALL":
            self.texts = {}

    def _go_back(self, moment: _Moment) -> None:
        # What was closed since stays closed, whatever its name was given to afterwards.
        now = self.state.cursors
        cursors = {name: made for name, made in moment.state.cursors.items() if now.get(name) is made}
        self.state = moment.state.after(prepared=self.state.prepared, cursors=cursors)
        self.settings, self._lasting, self.texts = moment.now, moment.lasting, moment.texts

    def _find(self, name: str) -> int:
        """Return the place of the newest savepoint *name*, the end if there is none."""
        found = [i for i, (other, _) in enumerate(self._savepoints) if other == name]
        return found[-1] if found else len(self._savepoints)

    def _roll_back_to(self, name: str, actions: int) -> int:
        at = self._find(name)
        if at < len(self._savepoints):
            moment = self._savepoints[at][1]
            self._go_back(moment)
            del self._savepoints[at + 1 :]
            return moment.actions
        return actions

    def _discard(self, decision: Decision) -> None:
        target = decision.statement.details.get("target")
        if target == "DISCARD_ALL":
            self.state = self.state.after(prepared={}, cursors={}, temporary={})
            self.settings = self._lasting = self._first
        elif target == "DISCARD_TEMP":
            self.state = self.state.after(temporary={})

    def _set(self, name: str, value: str | None, *, is_local: bool) -> None:
        if name == "all":
            self.settings = self._lasting = self._first
            return
        changed = self._reset(name) if value is None else self.settings.having(name, value)
        self.settings = changed
        if not is_local:
            lasting = self._lasting.having(name, value) if value is not None else None
            self._lasting = lasting or self._reset(name, self._lasting)

    def _reset(self, name: str, settings: Settings | None = None) -> Settings:
        settings = settings or self.settings
        if name == _DRY_RUN:
            return replace(settings, dry_run=self._first.dry_run)
        field_name = name.removeprefix(_OWN)
        first = getattr(self._first.said, field_name, None)
        return settings.having(name, None if first is None else str(first))


def _settings_of(statement: Statement) -> Iterator[tuple[str, str | None, bool]]:
    """Yield what *statement* sets of ours, as SET does or as set_config() does: name, value, whether LOCAL."""
    name = statement.subject or ""
    if statement.kind is Kind.RESET and not name:
        yield "all", None, False
    elif statement.kind in (Kind.SET, Kind.RESET) and name.startswith(_OWN):
        values = statement.details.get("values")
        yield name, str(values[0]) if values else None, bool(statement.details.get("local"))
    for call in () if statement.kind in _PUT_OFF else statement.calls:
        if call.name == SETTER and call.builtin:
            set_name, value, is_local = (*call.values, None, None, None)[:3]
            if isinstance(set_name, str) and set_name.lower().startswith(_OWN):
                yield set_name.lower(), None if value is None else str(value), is_local is True


def sets_ours(statement: Statement) -> bool:
    """Say whether a query changes our settings by set_config()."""
    return bool(statement.calls) and any(True for _ in _settings_of(statement))


def is_on(value: str | None) -> bool:
    """Read a boolean as PostgreSQL does for settings: any unambiguous beginning of the word."""
    text = (value or "").lower()
    return bool(text) and (text in ("on", "1") or "true".startswith(text) or "yes".startswith(text))
