"""
What the observing proxy counts: statement shapes per login, added to the database every second.

A thread of its own does the writing, so that a slow database never holds up what is observed. Nothing is ever
refused for want of a count: beyond the bound new shapes are not told apart, and the report says so.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from sqlguard import gate as gates
from sqlguard.errors import NotConfigured, SqlguardError
from sqlguard.plan import Decision
from sqlguard.policy import Policy
from sqlguard.postgres.control import Login
from sqlguard.postgres.observations import Observation, exchange
from sqlguard.statement.shape import shape
from sqlguard.task import Task

log = structlog.get_logger()
_EVERY = 1.0
#: Shapes between two writes; and texts whose shape is remembered.
_SHAPES, _TEXTS = 20_000, 4096
_MANY = "many shapes"
_END = datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class _Tally:
    key: tuple[Any, ...]
    said: dict[str, Any]
    first_at: datetime
    count: int = 0

    def observation(self) -> Observation:
        agent, role, policy, version, fingerprint, verdict = self.key
        return Observation(
            agent=agent,
            role=role,
            policy=policy,
            policy_version=version,
            fingerprint=fingerprint,
            verdict=verdict,
            count=self.count,
            first_at=self.first_at,
            last_at=datetime.now(UTC),
            **self.said,
        )


class Sightings:
    """Counts from `start` to `stop`. `policy` judges logins that are no task's."""

    def __init__(
        self, dsn: str, policy: str | None, roles: Iterable[str] = (), every: float = _EVERY
    ) -> None:
        self._dsn = dsn
        self._policy_name = policy
        self._roles = frozenset(roles)
        self._every = every
        self._seen: dict[tuple[object, ...], _Tally] = {}
        self._quick: dict[tuple[str, int], tuple[Decision, _Tally]] = {}
        self._lock = threading.Lock()
        self._shapes: dict[str, tuple[str, str]] = {}
        self._policy: Policy | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sqlguard-observed", daemon=True)

    def start(self) -> None:
        """Find the policy. Raises NotConfigured, DatabaseUnavailable."""
        self._choose(exchange(self._dsn, ()))
        self._thread.start()

    def stop(self) -> None:
        """Write what is left. Safe to repeat."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def observes(self, role: str) -> bool:
        return not self._roles or role in self._roles

    def stranger(self, role: str) -> Login | None:
        """Return a login that judges *role*, which is no task's, None without a policy for such."""
        policy = self._policy
        if policy is None:
            return None
        task = Task("", role, policy.name, policy.version or 0, _END)
        return Login(role, None, task, policy, _END)

    def saw(self, login: Login, decision: Decision) -> None:
        """Count one statement that was sent."""
        # Decisions are remembered by their text, so the same one comes again and again.
        key = (login.role, id(decision))
        with self._lock:
            known = self._quick.get(key)
            if known is not None:
                known[1].count += 1
                return
        fingerprint, text = self._shape(decision.statement.text)
        verdict = str(decision.verdict.effect)
        with self._lock:
            tally = self._tally(login, fingerprint, verdict, lambda: self._said(decision, text))
            tally.count += 1
            # Held, so that its id is nobody else's meanwhile.
            self._quick[key] = (decision, tally)

    def _said(self, decision: Decision, text: str) -> dict[str, Any]:
        finding = decision.verdict.decisive
        return {
            "kind": decision.kind.value,
            "rules": list(decision.verdict.rules),
            "message": finding.message if finding else None,
            "hint": finding.hint if finding else None,
            "tables": sorted({gates.qualified(w.table) for w in decision.statement.writes}),
            "sample": text,
            "executed": self._shape(decision.text)[1] if decision.rewritten else None,
        }

    def lost(self, login: Login, why: str) -> None:
        """Count what could not be followed: it was passed on like everything."""
        with self._lock:
            self._tally(login, why, "unknown", lambda: _unknown(why)).count += 1

    # --- parts

    def _tally(
        self, login: Login, fingerprint: str, verdict: str, more: Callable[[], dict[str, Any]]
    ) -> "_Tally":
        """Return what counts the shape; the lock must be held, so that it is not written away meanwhile."""
        task = login.task
        if len(self._seen) >= _SHAPES:
            fingerprint, more = _MANY, lambda: _unknown(_MANY)
        key = (task.agent, login.role, task.policy, task.policy_version, fingerprint, verdict)
        known = self._seen.get(key)
        if known is None:
            known = self._seen[key] = _Tally(key, more(), datetime.now(UTC))
        return known

    def _shape(self, text: str) -> tuple[str, str]:
        found = self._shapes.get(text)
        if found is None:
            made = shape(text)
            found = (made.fingerprint, made.text)
            self._shapes[text] = found
            if len(self._shapes) > _TEXTS:
                del self._shapes[next(iter(self._shapes))]
        return found

    def _run(self) -> None:
        while True:
            stopping = self._stopped.wait(self._every)
            self._write()
            if stopping:
                return

    def _write(self) -> None:
        with self._lock:
            seen, self._seen = self._seen, {}
            self._quick.clear()
        try:
            policies = exchange(self._dsn, [tally.observation() for tally in seen.values() if tally.count])
        except SqlguardError as fault:
            log.warning("observations not written", error=fault.message, shapes=len(seen))
            self._keep(seen)
            return
        with suppress(NotConfigured):  # a policy that has gone is still what was said at the start
            self._choose(policies)

    def _keep(self, seen: "dict[tuple[object, ...], _Tally]") -> None:
        """Take back what could not be written, so that it is written with the next."""
        with self._lock:
            for key, old in seen.items():
                new = self._seen.get(key)
                if new is not None:
                    new.count += old.count
                    new.first_at = old.first_at
                elif len(self._seen) < _SHAPES:
                    self._seen[key] = old

    def _choose(self, latest: Mapping[str, Policy]) -> None:
        if self._policy_name is not None:
            if self._policy_name not in latest:
                raise NotConfigured(
                    f"the policy `{self._policy_name}` is not in the database",
                    hint="run `sqlguard policy apply` with it, or name another with --observe-policy",
                )
            self._policy = latest[self._policy_name]
        elif len(latest) == 1:
            self._policy = next(iter(latest.values()))
        else:
            self._policy = None  # only tasks have one


def _unknown(why: str) -> dict[str, Any]:
    return {
        "kind": "unknown",
        "rules": [],
        "message": "passed on without having been judged",
        "hint": None,
        "tables": [],
        "sample": f"({why})",
        "executed": None,
    }
