"""Writes at the MCP door that wait for a person: the ticket, the approval, rows that have changed since."""

from collections.abc import Iterator

import jsonschema
import pytest
from end_to_end.mcp_world import World, answer, door, http_client, refusal, serving
from mcp.types import ElicitRequestParams, ElicitResult
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.policy_apply import apply_policy

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield World(database)


CAREFUL = """
name = "careful"

[tables."public.*"]
select = true
update = true
delete = "soft"

[[gates]]
when = { rows = ">3" }
then = "approve"
"""


def approve(world: World, plan: int) -> None:
    """A person's decision, with a login of their own."""
    name = f"sg_dana_{plan}"
    world.database.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret' IN ROLE sqlguard_approver")
    with world.database.connect(world.database.dsn_for(name, "secret")) as dana:
        plans.approve(dana, plan, plans.show(dana, plan).document["digest"])


@pytest.mark.parametrize("how", ["commit_plan", "write"])
async def test_a_plan_that_a_person_approves(world: World, how: str) -> None:
    apply_policy(world.owner, parse_policy(CAREFUL, "careful"))
    customer = 70 if how == "write" else 71
    said = {"sql": "DELETE FROM customers WHERE id = $1", "params": [customer]}
    living = f"SELECT count(*) FROM orders WHERE customer_id = {customer} AND deleted_at IS NULL"
    async with serving(door(world, policy="careful")) as url, http_client(url) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        stopped = refusal(await client.call_tool("write", said | {"reason": "asked for"}))
        assert stopped["sqlstate"] == "SG001"
        assert "sqlguard approve" in stopped["hint"]
        plan = int(stopped["hint"].split("sqlguard approve ")[1].split("`")[0])
        ticket = answer(await client.call_tool("ticket", {"plan": plan}))
        jsonschema.validate(ticket, tools["ticket"].output_schema or {})
        assert (ticket["state"], ticket["affected_rows"], ticket["approved_by"]) == ("open", 15, [])
        early = refusal(await client.call_tool("commit_plan", {"plan": plan}))
        assert early["sqlstate"] == "SG001"
        assert refusal(await client.call_tool("write", said | {"reason": "now!"}))["sqlstate"] == "SG001"
        assert world.value(living) == 4
        approve(world, plan)
        assert answer(await client.call_tool("ticket", {"plan": plan}))["state"] == "approved"
        if how == "write":
            done = answer(await client.call_tool("write", said | {"reason": "asked for"}))
        else:
            done = answer(await client.call_tool("commit_plan", {"plan": plan}))
            jsonschema.validate(done, tools["commit_plan"].output_schema or {})
        assert done["committed"]
        assert world.value(living) == 0
        again = answer(await client.call_tool("ticket", {"plan": plan}))
        assert again["state"] == "committed"
        assert refusal(await client.call_tool("commit_plan", {"plan": plan}))["sqlstate"] == "SG002"
        assert refusal(await client.call_tool("ticket", {"plan": 987654}))["sqlstate"] == "SG002"
        assert answer(await client.call_tool("undo", {}))["rows"] == 15


async def test_an_approved_plan_whose_rows_have_changed(world: World) -> None:
    apply_policy(world.owner, parse_policy(CAREFUL, "careful"))
    async with serving(door(world, policy="careful")) as url, http_client(url) as client:
        seen = answer(await client.call_tool("preview", {"sql": "DELETE FROM customers WHERE id = 72"}))
        assert seen["plan"]
        assert seen["report"]
        approve(world, seen["plan"])
        world.owner.execute("UPDATE orders SET note = 'changed since' WHERE customer_id = 72")
        drifted = refusal(await client.call_tool("commit_plan", {"plan": seen["plan"]}))
        assert drifted["sqlstate"] == "SG003"
        assert world.value("SELECT count(*) FROM customers WHERE id = 72 AND deleted_at IS NULL") == 1


async def test_a_client_that_says_yes_to_everything_approves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client is asked, an agent may answer: so it is asked nothing, whatever it says that it can do."""
    asked: list[object] = []

    async def yes(_: object, question: ElicitRequestParams) -> ElicitResult:
        asked.append(question)
        return ElicitResult(action="accept", content={"approve": True})

    for name in ("APPROVE", "APPROVED", "APPROVER", "YES", "AUTO_APPROVE"):
        monkeypatch.setenv(f"SQLGUARD_{name}", "1")
    apply_policy(world.owner, parse_policy(CAREFUL, "careful"))
    said = {"sql": "DELETE FROM customers WHERE id = 74", "reason": "approved by the owner"}
    async with (
        serving(door(world, policy="careful")) as url,
        http_client(url, elicitation_callback=yes) as client,
    ):
        assert not [tool.name for tool in (await client.list_tools()).tools if "approve" in tool.name]
        stopped = refusal(await client.call_tool("write", said))
        plan = int(stopped["hint"].split("sqlguard approve ")[1].split("`")[0])
        for tool, arguments in (
            ("commit_plan", {"plan": plan}),
            ("commit_plan", {"plan": plan, "approved": True, "approved_by": "dana"}),
            ("write", said),
            ("query", {"sql": f"SELECT sqlguard.decide_plan({plan}, 'approve', '', NULL)"}),
        ):
            assert (await client.call_tool(tool, arguments)).is_error
        assert answer(await client.call_tool("ticket", {"plan": plan}))["state"] == "open"
    assert asked == []
    assert world.value("SELECT count(*) FROM customers WHERE id = 74 AND deleted_at IS NULL") == 1
