"""
A person in the loop, who can't be played by the agent: LangGraph's interrupt() on top of sqlguard's approvals.

The graph writes through the proxy. Where the policy wants an approval, PostgreSQL answers SG001 with the plan and what
it would do, and changes nothing. The graph stops there (a checkpoint, no open transaction). A person looks and says
yes with a login of their own, which no agent has:

    sqlguard approve 7 --dsn postgresql://dana@db/shop

Then the graph is resumed, and sends the very same statement again. What resumes it is a signal and no approval: a
graph that is resumed without one gets SG001 again.

    python examples/langgraph_approval.py 'postgresql://sg_tk_…:…@127.0.0.1:6543/shop'

Needs: pip install sqlguard-pg langgraph
"""

import sys
from typing import Any

import sqlalchemy as sa
from langchain_core.messages import HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from scripted import ScriptedModel

import sqlguard

SCRIPT: list[Any] = [
    (
        "write",
        {"sql": "DELETE FROM customers WHERE id = 42", "reason": "asked to be forgotten", "key": "731"},
    ),
    "Customer 42 is deleted.",
]
APPROVAL_REQUIRED = "SG001"


def build(dsn: str, model: Any, checkpoints: Any) -> Any:
    """Return a graph of a model and one tool, which stops where a person has to approve."""
    engine = sqlguard.create_engine(dsn)

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def write(state: MessagesState) -> dict[str, Any]:
        # LangGraph runs a node from its start when it is resumed: that is the repeat of the same statement.
        call = state["messages"][-1].tool_calls[0]  # type: ignore[union-attr]
        said = {"sqlguard_reason": call["args"]["reason"], "sqlguard_idempotency_key": call["args"]["key"]}
        try:
            with engine.begin() as conn:
                done = conn.execute(sa.text(call["args"]["sql"]), execution_options=said)
                answer = f"{done.rowcount} row(s)"
        except sa.exc.DBAPIError as fault:
            told: Any = fault.orig
            answer = f"{told.sqlstate}: {told.diag.message_primary}. {told.diag.message_hint}"
            if told.sqlstate == APPROVAL_REQUIRED:
                interrupt({"why": told.diag.message_primary, "what": told.diag.message_detail})
        return {"messages": [ToolMessage(answer, tool_call_id=call["id"])]}

    def next_step(state: MessagesState) -> str:
        return "write" if state["messages"][-1].tool_calls else END  # type: ignore[union-attr]

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("write", write)
    graph.set_entry_point("think")
    graph.add_conditional_edges("think", next_step)
    graph.add_edge("write", "think")
    return graph.compile(checkpointer=checkpoints)


def main() -> None:
    graph = build(sys.argv[1], ScriptedModel(script=SCRIPT), InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "ticket-731"}}
    state = graph.invoke({"messages": [HumanMessage("Customer 42 wants to be forgotten.")]}, thread)
    while stopped := state.get("__interrupt__"):
        print(f"waiting: {stopped[0].value['why']}\n  {stopped[0].value['what']}", flush=True)
        print("press Enter when it is approved", flush=True)
        sys.stdin.readline()
        state = graph.invoke(Command(resume=True), thread)
    for message in state["messages"]:
        print(f"{message.type}: {message.text or message.tool_calls}")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
