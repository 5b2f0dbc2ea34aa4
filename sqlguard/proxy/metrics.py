"""
What the proxy tells Prometheus. The busy ways only add to plain numbers; the rest is looked up when somebody asks.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sqlguard.gate import Gate
from sqlguard.plan import Decision
from sqlguard.statement.model import Session

_FAST = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_SLOW = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
#: Help, the label if there is one, and the values by it; read when Prometheus asks.
Gauge = tuple[str, str | None, Callable[[], Mapping[str, float]]]


@dataclass(eq=False)
class Metrics(Collector):
    """One per process."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    #: Statements by verdict.
    verdicts: Counter[str] = field(default_factory=Counter)
    logins: Counter[str] = field(default_factory=Counter)
    gauges: dict[str, Gauge] = field(default_factory=dict)
    counters: dict[str, Gauge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decision = self._histogram(
            "decision_seconds", "deciding a text that was not decided before", _FAST
        )
        self.journal = self._histogram("journal_commit_seconds", "committing a group of intents", _SLOW)
        self.login = self._histogram("login_seconds", "a client's way in, PostgreSQL's part included", _SLOW)
        self.counters["decisions"] = ("statements by verdict", "verdict", lambda: self.verdicts)
        self.counters["logins"] = ("clients by how their login ended", "outcome", lambda: self.logins)
        self.registry.register(self)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"sqlguard_{name}", text, registry=self.registry, buckets=buckets)

    def collect(self) -> Iterator[Metric]:
        """Yield what is looked up now."""
        for kind, families in (
            (GaugeMetricFamily, self.gauges),
            (CounterMetricFamily, self.counters),
        ):
            for name, (text, label, values) in families.items():
                made = kind(f"sqlguard_{name}", text, labels=[label] if label else [])
                for key, value in values().items():
                    made.add_metric([key] if label else [], value)
                yield made

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


@dataclass
class TimedGate(Gate):
    """A gate that tells how long a decision takes that was not taken before."""

    metrics: Metrics = field(default_factory=Metrics, repr=False)

    def _decide(self, text: str, session: Session) -> tuple[Decision, ...]:
        began = perf_counter()
        try:
            return super()._decide(text, session)
        finally:
            self.metrics.decision.observe(perf_counter() - began)
