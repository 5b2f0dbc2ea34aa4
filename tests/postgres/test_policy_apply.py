"""Policies as group roles: what they give, that they give no more, and who may apply them."""

from collections.abc import Iterator
from typing import Any

import pytest
from servers import Database, fresh_database
from task_world import POLICY, World, agent, policy, refused, shop

from sqlguard.errors import NotConfigured, PolicyError
from sqlguard.policy import policy_from_document
from sqlguard.postgres import tasks
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy, plan_policy, refresh_policies
from sqlguard.postgres.policy_store import policy_document


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        yield made


def test_a_task_may_what_the_policy_lists_and_nothing_else(world: World) -> None:
    world.apply()
    conn = agent(world)
    assert conn.execute("SELECT id, name FROM customers WHERE id = 42").fetchall() == [(42, "Ada")]
    assert refused(conn, "SELECT email FROM customers") == "42501"
    assert refused(conn, "SELECT * FROM secrets") == "42501"
    assert conn.execute("SELECT count(*) FROM orders").fetchone() == (40,)
    assert len(conn.execute("SELECT * FROM orders").fetchall()) == 40
    conn.execute("INSERT INTO orders (customer_id, status) VALUES (42, 'new') RETURNING *")
    conn.execute("UPDATE orders SET status = 'paid' WHERE id = 1 RETURNING *")
    assert refused(conn, "UPDATE orders SET customer_id = 43 WHERE id = 1") == "42501"
    assert refused(conn, "DELETE FROM orders WHERE id = 1") == "42501"
    deleted = conn.execute(
        "UPDATE orders SET deleted_at = statement_timestamp(), deleted_by_agent = (SELECT sqlguard.agent())"
        " WHERE id = 1 RETURNING id"
    )
    assert deleted.fetchall() == [(1,)]
    assert conn.execute("SELECT count(*) FROM orders WHERE id = 1").fetchone() == (0,)
    conn.execute("UPDATE items SET quantity = 2 WHERE id = 1")
    conn.execute("DELETE FROM items WHERE id = 1")
    for statement in ("TRUNCATE items", "INSERT INTO items DEFAULT VALUES", "DELETE FROM customers"):
        assert refused(conn, statement) == "42501"
    assert refused(conn, "INSERT INTO orders (customer_id, deleted_at) VALUES (42, now())") == "42501"


def test_the_plan_is_readable_and_changes_nothing(world: World) -> None:
    plan = plan_policy(world.op, policy(POLICY))
    assert plan.group_role == "sg_po_support_1"
    assert 'GRANT SELECT ("id", "name", "deleted_at", "deleted_by_agent") ON TABLE "public"."customers"' in (
        "\n".join(plan.statements)
    )
    assert "sg_po_support_1" not in world.roles()
    assert world.value("SELECT count(*) FROM sqlguard.policy") == 0
    assert world.apply().statements == plan.statements


def test_the_same_document_again_changes_nothing(world: World) -> None:
    first, second = world.apply(), world.apply()
    assert (first.version, second.version) == (1, 1)
    assert second.statements == []
    assert plan_policy(world.op, policy(POLICY)).statements == []


def test_the_stored_document_reads_back_as_the_same_policy(world: World) -> None:
    written = policy(
        POLICY + '\n[[gates]]\nwhen = { class = "pii", confidence = "<0.7" }\nthen = "approve"\n'
    )
    assert policy_from_document(policy_document(written), "x") == written
    assert policy_from_document(policy_document(written), "x").tables["public.items"].model_fields_set == (
        written.tables["public.items"].model_fields_set
    )
    apply_policy(world.op, written)
    document = world.value("SELECT document FROM sqlguard.policy")
    assert policy_from_document(document, "x") == written


def test_a_changed_document_takes_away_and_open_tasks_keep_what_they_began_with(world: World) -> None:
    world.apply()
    old = agent(world)
    changed = world.apply(POLICY.replace('update = ["status", "note"]', 'update = ["note"]'))
    assert (changed.version, changed.group_role) == (2, "sg_po_support_2")
    new = agent(world)
    old.execute("UPDATE orders SET status = 'x' WHERE id = 1")
    assert refused(new, "UPDATE orders SET status = 'x' WHERE id = 1") == "42501"
    new.execute("UPDATE orders SET note = 'x' WHERE id = 1")
    assert {"sg_po_support_1", "sg_po_support_2"} <= world.roles()
    # The last lease of the old group ends: the next apply drops it, whatever it is about.
    for task in tasks.list_tasks(world.op):
        tasks.end_task(world.op, task.id, "done")
    assert world.apply(POLICY.replace('update = ["status", "note"]', "")).version == 3
    assert not {"sg_po_support_1", "sg_po_support_2"} & world.roles()


def test_existing_drop_moves_open_sessions_at_once(world: World) -> None:
    world.apply()
    conn = agent(world)
    world.apply(POLICY.replace('update = ["status", "note"]', 'update = ["note"]'), existing="drop")
    assert refused(conn, "UPDATE orders SET status = 'x' WHERE id = 1") == "42501"
    conn.execute("UPDATE orders SET note = 'x' WHERE id = 1")
    assert tasks.list_tasks(world.op)[0].policy_version == 2
    assert "sg_po_support_1" not in world.roles()


def test_names_that_are_not_there_are_errors(world: World) -> None:
    cases = {
        '[tables."public.nowhere"]\nselect = true': "there is no table `public.nowhere`",
        '[tables."shop.*"]\nselect = true': r"no table matches `shop.\*`",
        '[tables."public.orders"]\nselect = ["id", "colour"]': "no column `colour`",
        '[tables."public.orders"]\nupdate = ["deleted_at"]': "kept by sqlguard",
        '[functions."public.vanish(integer)"]': "there is no function `public.vanish",
        '[functions."public.refund(integer)"]\ncompensation = "public.back(integer)"': "the compensation of",
        '[tables."sqlguard.*"]\nselect = true': "no table matches",
        '[tables."public.orders"]\nselect = true\nrows = "colour = :c"': 'column "colour" does not exist',
        '[tables."public.orders"]\nselect = true\nrows = "true) OR (true"': "not a condition",
        '[tables."public.orders"]\nselect = true\nrows = "true; DROP TABLE orders"': "not a condition",
        '[tables."public.orders"]\nselect = true\nrows = "true, false"': "not a condition",
        '[tables."public.orders"]\nselect = true\nrows = "true GROUP BY id"': "not a condition",
        '[tables."public.orders"]\nselect = true\nrows = "true -- :c"': "",
        '[tables."public.orders"]\nselect = true\nrows = "customer_id"': "must be type boolean",
        '[tables."public.orders"]\nselect = true\nrows = ""': "not a condition",
    }
    for text, message in cases.items():
        if message:
            with pytest.raises(PolicyError, match=message):
                world.apply(f'name = "bad"\n{text}')
    assert world.value("SELECT count(*) FROM sqlguard.policy") == 0
    with pytest.raises(PolicyError) as caught:
        world.apply('name = "bad"\n[tables.x]\n[tables.y]\n')
    assert caught.value.detail is not None
    assert len(caught.value.detail.splitlines()) == 1  # the other one is the message


def test_a_table_without_a_guard_is_read_only_until_it_has_one(world: World) -> None:
    text = (
        'name = "support"\n[tables."public.*"]\nselect = true\ninsert = true\nupdate = true\ndelete = "soft"'
    )
    done = world.apply(text)
    assert any("`public.secrets` is not guarded: no write" in w for w in done.warnings)
    assert any("`public.items` is guarded as journal, the policy says soft" in w for w in done.warnings)
    conn = agent(world)
    for statement in ("INSERT INTO secrets VALUES (2, 'x')", "UPDATE secrets SET word = ''"):
        assert refused(conn, statement) == "42501"
    assert refused(conn, "DELETE FROM items WHERE id = 1") == "42501"
    guard_tables(world.op, ["public.secrets"], "soft")
    refresh_policies(world.op)
    conn.execute("UPDATE secrets SET word = 'x' WHERE id = 1")
    conn.execute("INSERT INTO secrets VALUES (2, 'x')")
    assert world.apply(text).statements == []


def test_new_tables_come_with_the_next_apply_of_the_same_version(world: World) -> None:
    text = 'name = "support"\n[tables."public.*"]\nselect = true'
    world.apply(text)
    conn = agent(world)
    world.op.execute("CREATE TABLE late (id integer)")
    assert refused(conn, "SELECT * FROM late") == "42501"
    again = world.apply(text)
    assert again.version == 1
    assert again.statements == ['GRANT SELECT ON TABLE "public"."late" TO "sg_po_support_1"']
    conn.execute("SELECT * FROM late")


def test_what_somebody_granted_to_the_group_by_hand_is_taken_back(world: World) -> None:
    world.apply()
    world.op.execute("GRANT SELECT ON secrets TO sg_po_support_1")
    world.op.execute("GRANT UPDATE (email) ON customers TO sg_po_support_1")
    assert world.apply().statements == [
        'REVOKE UPDATE ("email") ON TABLE "public"."customers" FROM "sg_po_support_1"',
        'REVOKE SELECT ON TABLE "public"."secrets" FROM "sg_po_support_1"',
    ]
    assert refused(agent(world), "SELECT * FROM secrets") == "42501"


def test_functions_are_granted_by_signature_or_name(world: World) -> None:
    world.op.execute("REVOKE EXECUTE ON FUNCTION refund(integer) FROM PUBLIC")
    world.op.execute("CREATE PROCEDURE tidy(a integer, b text DEFAULT '') LANGUAGE sql AS ''")
    world.op.execute("REVOKE EXECUTE ON PROCEDURE tidy FROM PUBLIC")
    world.apply()
    conn = agent(world)
    assert refused(conn, "SELECT refund(1)") == "42501"
    world.apply(
        POLICY + '\n[functions."public.refund(integer)"]\ntier = "compensable"\n[functions."public.tidy"]\n',
        existing="drop",
    )
    assert conn.execute("SELECT refund(1)").fetchone() == (1,)
    conn.execute("CALL tidy(1)")


def test_defaults_that_take_numbers_from_a_sequence_work(world: World) -> None:
    world.apply()
    conn = agent(world)
    conn.execute("INSERT INTO orders (customer_id) VALUES (42)")
    assert refused(conn, "SELECT setval('orders_id_seq', 1)") == "42501"


def test_names_that_need_quotes(world: World) -> None:
    world.op.execute('CREATE SCHEMA "My Shop"')
    world.op.execute('CREATE TABLE "My Shop"."or""ders %s" (id integer PRIMARY KEY, "the note" text)')
    guard_tables(world.op, ['My Shop.or"ders %s'], "soft")
    world.apply(
        'name = "quoted-1"\n[defaults]\nsearch_path = ["My Shop", "public"]\n'
        '[tables.\'My Shop.or"ders %s\']\nselect = true\ninsert = true\nupdate = ["the note"]\n'
        'rows = "\\"the note\\" <> :word"\n'
    )
    conn = agent(world, "quoted-1", word="x'y")
    conn.execute(b'INSERT INTO "or""ders %s" VALUES (1, \'n\')')
    assert conn.execute(b'SELECT "the note" FROM "or""ders %s"').fetchall() == [("n",)]


def test_two_databases_of_a_cluster_do_not_share_a_group(world: World, server: Any) -> None:
    world.apply()
    with fresh_database(server) as other, shop(other) as second:
        world.database.execute("GRANT sqlguard_agent TO app_owner WITH ADMIN OPTION")
        applied = second.apply()
        assert applied.group_role.startswith("sg_po_support_1_")
        opened = second.task()
        assert refused_login(world, opened)


def refused_login(world: World, opened: tasks.OpenedTask) -> bool:
    """A task of another database may be let in (CONNECT is everybody's), and then sees nothing."""
    conn = world.database.connect(world.database.dsn_for(opened.role, opened.password))
    return refused(conn, "SELECT * FROM orders") == "42501"


def test_the_tables_belong_to_somebody_else(database: Database) -> None:
    """The operator has CREATEROLE and its own schema; the tables are another role's, whose member it must be."""
    with database.connect(database.owner_dsn) as owner:
        owner.execute("CREATE TABLE orders (id integer PRIMARY KEY, customer_id integer)")
    database.execute("CREATE ROLE sg_operator LOGIN CREATEROLE PASSWORD 'x'")
    database.execute(f"GRANT CREATE ON DATABASE {database.name} TO sg_operator")
    dsn = database.dsn_for("sg_operator", "x")
    migrate(dsn)
    op = database.connect(dsn)
    text = 'name = "p"\n[tables."public.orders"]\nselect = true\nrows = "customer_id = :c"'
    plan = plan_policy(op, policy(text))
    assert "GRANT app_owner TO sg_operator" in plan.lacking
    # Where another database's operator has made the agents' group, it has to hand that on as well.
    assert all("app_owner" in grant or "sqlguard_agent" in grant for grant in plan.lacking)
    assert any("GRANT app_owner TO sg_operator" in w for w in plan.warnings)
    with pytest.raises(NotConfigured) as caught:
        apply_policy(op, policy(text))
    assert "GRANT app_owner TO sg_operator" in (caught.value.hint or "")
    assert database.execute("SELECT count(*) FROM sqlguard.policy") == [(0,)]
    for statement in plan.lacking:
        database.execute(statement)
    apply_policy(op, policy(text))
    opened = tasks.open_task(op, agent="a", policy="p", params={"c": "1"})
    conn = database.connect(database.dsn_for(opened.role, opened.password))
    assert conn.execute("SELECT * FROM orders").fetchall() == []
    assert tasks.end_task(op, opened.task.id, "done").problems == ()
    # The operator is no owner: agents' policies must not have come to apply to it on the way.
    assert op.execute("SELECT count(*) FROM orders").fetchone() == (0,)


def test_an_operator_who_did_not_migrate_is_told_the_grant(world: World) -> None:
    world.database.execute("CREATE ROLE sg_second LOGIN PASSWORD 'x'")
    world.database.execute("GRANT app_owner TO sg_second")
    conn = world.database.connect(world.database.dsn_for("sg_second", "x"))
    plan = plan_policy(conn, policy(POLICY))
    assert "ALTER ROLE sg_second CREATEROLE" in plan.lacking


def test_a_database_that_was_not_migrated_says_so(database: Database) -> None:
    with pytest.raises(NotConfigured, match="no schema `sqlguard`"):
        plan_policy(database.connect(), policy('name = "p"'))
    with pytest.raises(NotConfigured, match="no schema `sqlguard`"):
        tasks.list_tasks(database.connect())
