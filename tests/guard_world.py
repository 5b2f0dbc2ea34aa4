"""
A small catalog and policy for the guard's tests without a server: the tables that the rules' pages speak of.

It is a cut of the schema that the guard cases use: `accounts`, `orders` and `tickets` are guarded as soft, `kv`
as journal, `docs` is not guarded, `audit_log` may only be read, `priv` is out of bounds.
"""

from typing import Any

from sqlguard.catalog import (
    Cast,
    Catalog,
    Column,
    ForeignKey,
    Function,
    Guard,
    Operator,
    Rule,
    Table,
    Trigger,
    Type,
    Unique,
    live_parent_trigger,
)
from sqlguard.policy import Policy, decide
from sqlguard.policy.context import Context
from sqlguard.policy.verdict import Verdict
from sqlguard.statement import analyse
from sqlguard.statement.model import Session, Statement

PATH = ("app", "public")
SESSION = Session(search_path=PATH)
INT, TEXT, BOOL, NUMERIC, MOMENT, JSONB, FLOAT = 23, 25, 16, 1700, 1184, 3802, 701
_TYPES = {
    INT: "integer",
    TEXT: "text",
    BOOL: "boolean",
    NUMERIC: "numeric",
    MOMENT: "timestamp with time zone",
    JSONB: "jsonb",
    FLOAT: "double precision",
}
SOFT = Guard("soft", 1, ("deleted_at", "deleted_by_agent"))
JOURNAL = Guard("journal")
MONEY_KIND = 600


def _columns(text: str) -> tuple[Column, ...]:
    """`id int! name text` -> columns; `!` is NOT NULL."""
    names = {
        "int": INT,
        "text": TEXT,
        "bool": BOOL,
        "num": NUMERIC,
        "ts": MOMENT,
        "json": JSONB,
        "float": FLOAT,
    }
    words = text.split()
    found = []
    for number, (name, kind) in enumerate(zip(words[::2], words[1::2], strict=True), 1):
        oid = names[kind.rstrip("!")]
        found.append(Column(name, number, oid, _TYPES[oid], not_null=kind.endswith("!")))
    return tuple(found)


def _table(
    oid: int, name: str, columns: str, key: str | None = "id", schema: str = "app", **more: Any
) -> Table:
    uniques = (Unique(f"{name}_pkey", (key,), primary=True, constraint=True),) if key else ()
    return Table(oid, schema, name, more.pop("kind", "r"), _columns(columns), uniques, **more)


def _function(oid: int, name: str, types: tuple[int, ...] = (), **more: Any) -> Function:
    names = tuple("app.accounts" if t == 1 else _TYPES[t] for t in types)
    return Function(
        oid, more.pop("schema", "app"), name, types, names, language=more.pop("language", "plpgsql"), **more
    )


TABLES = (
    _table(
        1,
        "accounts",
        "id int! owner_name text! email text balance num! amount float status text deleted bool! meta json"
        " parent_id int created_at ts deleted_at ts deleted_by_agent text",
        guard=SOFT,
    ),
    _table(
        2,
        "orders",
        "id int! account_id int status text total num deleted_at ts deleted_by_agent text",
        guard=SOFT,
        triggers=(
            Trigger(
                live_parent_trigger("orders_account", "insert"),
                frozenset({"insert"}),
                "AFTER",
                for_each_row=True,
                function=110,
                ours=True,
            ),
        ),
    ),
    _table(3, "order_items", "id int! order_id int sku text qty int"),
    _table(
        4,
        "tickets",
        "id int! title text body text state text deleted_at ts deleted_by_agent text",
        guard=SOFT,
        triggers=(Trigger("tickets_aiud", frozenset({"insert", "update", "delete"}), "AFTER", True, 110),),  # noqa: FBT003
    ),
    _table(
        5,
        "notes",
        "id int! body text",
        rules=(
            Rule(
                "notes_upd",
                "update",
                instead=False,
                definition="CREATE RULE notes_upd AS ON UPDATE TO app.notes"
                " DO DELETE FROM app.kv WHERE (kv.k = 'note-cache'::text);",
            ),
        ),
    ),
    _table(6, "audit_log", "id int! at ts what text"),
    _table(7, "docs", "id int! title text", children=(8,)),
    _table(8, "docs_old", "id int! title text", None, parents=(7,)),
    _table(9, "kv", "k text! v text", "k", guard=JOURNAL),
    _table(
        20,
        "v_active_accounts",
        "id int owner_name text balance num deleted_at ts",
        None,
        kind="v",
        definition="SELECT accounts.id, accounts.owner_name, accounts.balance, accounts.deleted_at"
        " FROM app.accounts WHERE (accounts.deleted_at IS NULL);",
    ),
    _table(
        21,
        "v_account_orders",
        "account_id int order_id int total num",
        None,
        kind="v",
        definition="SELECT a.id AS account_id, o.id AS order_id, o.total"
        " FROM (app.accounts a JOIN app.orders o ON ((o.account_id = a.id)));",
        triggers=(Trigger("v_del", frozenset({"delete"}), "INSTEAD OF", True, 111),),  # noqa: FBT003
    ),
    _table(
        22,
        "v_sleepy",
        "x text",
        None,
        kind="v",
        definition="SELECT (pg_catalog.pg_sleep((1)::double precision))::text AS x;",
    ),
    _table(30, "secrets", "id int token text", None, schema="priv"),
)
FUNCTIONS = (
    _function(
        100, "purge_all", security_definer=True, source="BEGIN DELETE FROM app.order_items; RETURN 1; END"
    ),
    _function(101, "purge_row", (1,), source="BEGIN DELETE FROM app.order_items; RETURN 1; END"),
    _function(
        102, "innocent", (INT,), volatility="i", source="BEGIN PERFORM app.purge_all(); RETURN $1; END"
    ),
    _function(
        103,
        "f_read",
        (INT,),
        volatility="s",
        language="sql",
        source="SELECT balance FROM app.accounts WHERE id = $1",
    ),
    _function(
        104, "lower", (TEXT,), source="BEGIN PERFORM app.purge_all(); RETURN pg_catalog.lower($1); END"
    ),
    _function(105, "json_value", (TEXT,), source="BEGIN PERFORM app.purge_all(); RETURN 1; END"),
    _function(106, "nosy_eq", (INT, INT), source="BEGIN PERFORM app.purge_all(); RETURN $1 = $2; END"),
    _function(107, "nosy_state", (INT, INT), source="BEGIN PERFORM app.purge_all(); RETURN $1 + 1; END"),
    _function(108, "agg_nosy", (INT,), kind="a", calls=(107,), language="internal"),
    _function(109, "to_money_kind", (TEXT,), source="BEGIN PERFORM app.purge_all(); RETURN ROW(1); END"),
    _function(110, "trg_tickets", source="BEGIN RETURN NEW; END", return_type=2279),
    _function(112, "refund", (INT,), source="BEGIN INSERT INTO app.kv VALUES ('r', $1); RETURN 1; END"),
    _function(
        113,
        "grade",
        (INT,),
        volatility="i",
        source="DECLARE g text; BEGIN IF $1 > 5 THEN g := 'high'; ELSE g := 'low'; END IF; RETURN g; END",
    ),
)
CATALOG = Catalog(
    version="test",
    server_version=150_000,
    tables={t.oid: t for t in TABLES},
    functions={f.oid: f for f in FUNCTIONS},
    operators=(Operator(500, "app", "===", INT, INT, 106),),
    casts=(Cast(TEXT, MONEY_KIND, 109, "e"),),
    types={MONEY_KIND: Type(MONEY_KIND, "app", "money_kind", "c")},
    foreign_keys=(
        ForeignKey("orders_account", 2, ("account_id",), 1, ("id",)),
        ForeignKey("items_order", 3, ("order_id",), 2, ("id",)),  # newer than the guard of `orders`
    ),
    schemas=frozenset({"app", "public", "priv"}),
)
ALL = {"select": True, "insert": True, "update": True, "delete": "soft"}
NONE = {"insert": False, "update": False, "delete": "refuse"}


def policy(**changes: Any) -> Policy:
    """Return the policy of the guard cases; *changes* are keys of the document."""
    document: dict[str, Any] = {
        "name": "cases",
        "defaults": {"search_path": PATH},
        "tables": {"app.*": ALL, "app.audit_log": {"select": True, **NONE}},
    }
    return Policy.model_validate({**document, **changes})


def context(catalog: Catalog = CATALOG, **changes: Any) -> Context:
    plan_only = changes.pop("plan_only", False)
    return Context(catalog, policy(**changes), None, plan_only=plan_only)


CONTEXT = context()


def read(text: str, session: Session = SESSION, catalog: Catalog = CATALOG) -> Statement:
    """Return the one statement of *text*."""
    (statement,) = analyse(text, catalog, session)
    return statement


def verdict(text: str, session: Session = SESSION, where: Context = CONTEXT) -> Verdict:
    """Return the verdict on the one statement of *text*."""
    return decide(read(text, session, where.catalog), session, where)
