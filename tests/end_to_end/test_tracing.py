"""OpenTelemetry: each journaled statement is a span, a child of the agent's own if it says which."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from end_to_end.inprocess import proxy
from end_to_end.wired import Agent, Wired

from sqlguard.proxy.tracing import SpanTracing

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` and an SDK are not installed")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAID = f"/*traceparent='00-{TRACE}-{PARENT}-01'*/"


@pytest.fixture
def exporter() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415

    return InMemorySpanExporter()


@pytest.fixture
def traced(wired_world: Wired, agent: Agent, exporter: Any) -> Iterator[Agent]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415

    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with proxy(wired_world.database.owner_dsn, tracing=SpanTracing(provider.get_tracer("test"))) as running:
        yield replace(agent, port=running.port)
    provider.shutdown()


def spans(wired: Wired, agent: Agent, exporter: Any, number: int) -> list[Any]:
    """Ended spans, in the order of their ends; how an action ended is known a bit later."""
    wired.outcomes(agent)
    found = list(exporter.get_finished_spans())
    assert len(found) == number, [span.name for span in found]
    return found


def test_a_write_is_a_child_of_the_agents_span(wired_world: Wired, traced: Agent, exporter: Any) -> None:
    with traced.connect() as conn:
        conn.execute(f"UPDATE orders SET note = 'a secret' WHERE id = 8 {SAID}")
    (span,) = spans(wired_world, traced, exporter, 1)
    assert span.name == "sqlguard update"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes["sqlguard.verdict"] == "allow"
    assert span.attributes["sqlguard.outcome"] == "committed"
    assert span.attributes["sqlguard.agent"] == "tester"
    assert span.attributes["db.response.tag"] == "UPDATE 1"
    assert span.end_time > span.start_time
    assert "secret" not in span.to_json()


def test_prepared_statements_are_spans_too(wired_world: Wired, traced: Agent, exporter: Any) -> None:
    with traced.connect() as conn:
        for number in (21, 22):
            conn.execute(f"DELETE FROM customers WHERE id = %s {SAID}", [number], prepare=True)
    found = spans(wired_world, traced, exporter, 2)
    assert {span.attributes["sqlguard.verdict"] for span in found} == {"rewrite"}
    assert {f"{span.context.trace_id:032x}" for span in found} == {TRACE}


def test_refusals_and_failures_are_errors(wired_world: Wired, traced: Agent, exporter: Any) -> None:
    with traced.connect() as conn:
        with pytest.raises(psycopg.Error):
            conn.execute(f"DROP TABLE orders {SAID}")
        with pytest.raises(psycopg.errors.DivisionByZero):
            conn.execute("UPDATE orders SET total = 1 / 0 WHERE id = 8")
        with pytest.raises(ZeroDivisionError), conn.transaction():
            conn.execute("UPDATE orders SET note = 'x' WHERE id = 9")
            raise ZeroDivisionError
    refused, failed, rolled_back = spans(wired_world, traced, exporter, 3)
    assert not refused.status.is_ok
    assert f"{refused.parent.span_id:016x}" == PARENT
    assert failed.parent is None
    assert (failed.status.is_ok, failed.status.description) == (False, "22012")
    assert (rolled_back.status.is_ok, rolled_back.attributes["sqlguard.outcome"]) == (False, "failed")


def test_reads_are_no_spans(wired_world: Wired, traced: Agent, exporter: Any) -> None:
    with traced.connect() as conn:
        conn.execute(f"SELECT 1 {SAID}")
        conn.execute("UPDATE orders SET note = 'x' WHERE id = 8")
    (span,) = spans(wired_world, traced, exporter, 1)
    assert span.name == "sqlguard update"
