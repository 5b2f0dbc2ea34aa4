"""`sqlguard init` on a real database: it writes what can be applied, and never over what is there."""

import json
from pathlib import Path
from typing import Any

import pytest
from end_to_end.shop import SHOP, sqlguard
from servers import Database

from sqlguard.policy import parse_policy
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.starting_policy import propose, render

MORE = """
CREATE TABLE logs (line text);
CREATE TABLE users (id integer PRIMARY KEY, email text, password text, api_key text);
CREATE TABLE watched (id integer PRIMARY KEY);
CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER watching AFTER DELETE ON watched FOR EACH ROW EXECUTE FUNCTION watch();
CREATE SCHEMA other;
CREATE TABLE other."Odd name's" (id integer PRIMARY KEY, n integer GENERATED ALWAYS AS (id + 1) STORED);
"""


@pytest.fixture
def shop(database: Database) -> Database:
    migrate(database.owner_dsn)
    database.load(SHOP + MORE, database.owner_dsn)
    return database


def test_what_is_proposed_is_what_guarding_would_choose(shop: Database) -> None:
    owner = shop.connect(shop.owner_dsn)
    found = {p.table: p for p in propose(owner)}
    modes = {table: p.mode for table, p in found.items()}
    assert modes["public.orders"] == "soft"
    assert modes["public.logs"] == modes["public.watched"] == "journal"
    assert "waits for DELETE" in " ".join(found["public.watched"].notes)
    assert found["public.users"].secrets == ("password", "api_key")
    assert found["public.users"].classes == ("pii",)
    assert found["other.Odd name's"].writable == ()
    assert not any(table.startswith("sqlguard.") for table in found)


def test_it_can_be_applied_with_all_that_it_proposes(shop: Database) -> None:
    owner = shop.connect(shop.owner_dsn)
    text = render("agent", shop.name, propose(owner))
    apply_policy(owner, parse_policy(text, "agent.toml"))


def test_the_command(shop: Database, tmp_path: Path) -> None:
    def run(*words: str, status: int = 0) -> Any:
        return sqlguard("init", *words, dsn=shop.owner_dsn, cwd=tmp_path, status=status)

    said = run("helper")
    path = tmp_path / "policies" / "helper.toml"
    assert Path(said["path"]) == Path("policies/helper.toml")
    assert said["next"][0] == "sqlguard policy apply policies/helper.toml"
    assert {t["table"] for t in said["tables"]} >= {"public.orders", "public.logs"}
    parse_policy(path.read_text(), "helper")
    path.write_text("mine")
    refused = run("helper", status=2)
    assert "--force" in refused["hint"]
    assert path.read_text() == "mine"
    run("helper", "--force")
    assert path.read_text() != "mine"
    assert json.dumps(run("Bad Name!", "-o", "x.toml", status=2))
    assert not (tmp_path / "x.toml").exists()
