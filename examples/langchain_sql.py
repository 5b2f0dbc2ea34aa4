"""
LangChain's SQL tools on a guarded database: the toolkit does not know that it is guarded.

    sqlguard serve &
    sqlguard task open --agent langchain --policy support --ttl 15min --json
    python examples/langchain_sql.py 'postgresql://sg_tk_…:…@127.0.0.1:6543/shop'

The agent looks around, tries to empty a table, is told what would pass, and deletes what it was asked to.
Needs: pip install sqlguard-pg langchain-community langgraph
"""

import json
import sys
from typing import Any

from langchain_community.agent_toolkits import SQLDatabaseToolkit
from langchain_community.utilities import SQLDatabase
from langchain_core.messages import HumanMessage, ToolMessage
from langgraph.graph import END, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from scripted import ScriptedModel

import sqlguard

SCRIPT: list[Any] = [
    ("sql_db_list_tables", {}),
    ("sql_db_schema", {"table_names": "orders, items"}),
    ("sql_db_query", {"query": "SELECT count(*) FROM orders WHERE customer_id = 42"}),
    ("sql_db_query", {"query": "DELETE FROM orders"}),
    ("sql_db_query", {"query": "DELETE FROM orders WHERE customer_id = 42 RETURNING id"}),
    "Customer 42's orders are deleted.",
]


def build(dsn: str, model: Any) -> Any:
    """Return a graph: the model and LangChain's SQL tools take turns until the model has nothing to call."""
    engine = sqlguard.create_engine(dsn)
    # What these statements are for, in the journal, whatever the model says.
    database = SQLDatabase(engine.execution_options(sqlguard_reason="clean up after customer 42"))
    tools = SQLDatabaseToolkit(db=database, llm=model).get_tools()
    thinking = model.bind_tools(tools)

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [thinking.invoke(state["messages"])]}

    def next_step(state: MessagesState) -> str:
        return "tools" if state["messages"][-1].tool_calls else END  # type: ignore[union-attr]

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode(tools))
    graph.set_entry_point("think")
    graph.add_conditional_edges("think", next_step)
    graph.add_edge("tools", "think")
    return graph.compile()


def main() -> None:
    graph = build(sys.argv[1], ScriptedModel(script=SCRIPT))
    ended = graph.invoke({"messages": [HumanMessage("Delete the orders of customer 42.")]})
    answers = [m.content for m in ended["messages"] if isinstance(m, ToolMessage)]
    print(json.dumps({"tools": answers, "said": ended["messages"][-1].content}, indent=2))


if __name__ == "__main__":
    main()
