"""The policies that come with sqlguard: they apply to the shop they speak of, and their cases hold."""

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from servers import Database

from sqlguard.gate import Gate
from sqlguard.policy import parse_policy
from sqlguard.policy.context import Context
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task
from sqlguard.statement.model import Session

FOLDER = Path(__file__).resolve().parents[2] / "policies"
SHOP = files("sqlguard.demo").joinpath("shop.sql").read_text(encoding="utf-8")
TABLES = ["public.customers", "public.staff", "public.products", "public.orders", "public.items"]
PARAMS = {"support": {"customer_id": "42"}}


@pytest.mark.parametrize("name", ["support", "readonly"])
def test_a_shipped_policy_keeps_its_promises(database: Database, name: str) -> None:
    path = FOLDER / f"{name}.toml"
    policy = parse_policy(path.read_text(encoding="utf-8"), str(path))
    migrate(database.owner_dsn)
    owner = database.connect(database.owner_dsn)
    owner.execute(SHOP.encode())
    guard_tables(owner, TABLES, "soft")
    assert apply_policy(owner, policy).warnings == []

    gate = Gate(Context(read_catalog(owner), policy, None))
    cases = tomllib.loads((FOLDER / f"{name}.cases.toml").read_text(encoding="utf-8"))["cases"]
    got = []
    for case in cases:
        decisions = gate.decide(case["sql"], Session(search_path=policy.defaults.search_path))
        got.append((case["sql"], [str(d.verdict.effect) for d in decisions]))
    assert got == [(case["sql"], [case["verdict"]]) for case in cases]

    opened = open_task(owner, agent="a", policy=name, params=PARAMS.get(name, {}))
    agent = database.connect(database.dsn_for(opened.role, opened.password))
    seen = agent.execute("SELECT count(DISTINCT customer_id) FROM orders").fetchone()
    assert seen == ((1,) if name == "support" else (600,))
