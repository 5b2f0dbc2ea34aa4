"""
OpenTelemetry spans of journaled statements, as children of the agent's own span (`traceparent` in sqlcommenter form).

Optional: without the package `opentelemetry-api` nothing happens, and without an SDK the API does nothing either. A
span lasts from the intent to how it ended, and holds no text of the statement.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from sqlguard import annotation
from sqlguard.journal import Intent

try:
    from opentelemetry import propagate, trace
except ImportError:  # pragma: no cover (the extra `otel` is not installed)
    HAS_API = False
else:
    HAS_API = True
#: Spans under way; what never ends (a session that is cut off in its transaction) is ended when this is exceeded.
_OPEN = 10_000
_FAILED = "failed"


class Tracing(Protocol):
    """What the operator's side tells of the journal."""

    def begins(self, action: int, intent: Intent) -> None: ...

    def ends(self, action: int, kind: str, detail: Mapping[str, Any]) -> None: ...

    def refused(self, intent: Intent) -> None: ...


class NoTracing:
    def begins(self, action: int, intent: Intent) -> None: ...

    def ends(self, action: int, kind: str, detail: Mapping[str, Any]) -> None: ...

    def refused(self, intent: Intent) -> None: ...


class SpanTracing:
    """Makes spans with *tracer*, or with the one that the process has set up."""

    def __init__(self, tracer: "trace.Tracer | None" = None) -> None:
        self._is_given = tracer is not None
        self._tracer = tracer or trace.get_tracer("sqlguard")
        self._open: dict[int, trace.Span] = {}

    def begins(self, action: int, intent: Intent) -> None:
        if not (self._is_given or _is_set_up()):
            return
        span = self._span(intent)
        span.set_attribute("sqlguard.action", action)
        self._open[action] = span
        if len(self._open) > _OPEN:
            self._open.pop(next(iter(self._open))).end()

    def ends(self, action: int, kind: str, detail: Mapping[str, Any]) -> None:
        span = self._open.pop(action, None)
        if span is None:
            return
        span.set_attribute("sqlguard.outcome", kind)
        if "tag" in detail:
            span.set_attribute("db.response.tag", str(detail["tag"]))
        if kind == _FAILED:
            span.set_status(trace.StatusCode.ERROR, str(detail.get("sqlstate") or detail.get("reason") or ""))
        span.end()

    def refused(self, intent: Intent) -> None:
        span = self._span(intent)
        span.set_status(trace.StatusCode.ERROR, ", ".join(intent.rules))
        span.end()

    def _span(self, intent: Intent) -> "trace.Span":
        said = annotation.read(intent.statement or "").traceparent
        context = propagate.extract({"traceparent": said}) if said else None
        attributes: dict[str, str] = {
            "db.system.name": "postgresql",
            "db.operation.name": intent.kind or "",
            "sqlguard.verdict": intent.verdict,
            "sqlguard.task": intent.task or "",
            "sqlguard.agent": intent.agent or "",
        }
        return self._tracer.start_span(
            f"sqlguard {intent.kind}", context, kind=trace.SpanKind.SERVER, attributes=attributes
        )


def _is_set_up() -> bool:
    """Say whether anybody looks at spans: making one that nobody sees is the dearest part of an intent."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def tracing() -> Tracing:
    """Return what makes spans, if it can."""
    return SpanTracing() if HAS_API else NoTracing()
