"""
Make `sqlguard/functions/*.tsv`: which functions, operators, casts and settings PostgreSQL has, and what
they do.

The one idea: identities come from real servers, judgements from `function_rules.toml`, and a VOLATILE or
STABLE function that nobody has judged by name stops the build. So a new PostgreSQL release can't slip a
function in.

    python scripts/build_functions.py \
        --dsn "host=127.0.0.1 port=5415 dbname=x user=postgres" --dsn … \
        --script postgis:3.3=/usr/share/postgresql/15/extension/postgis--3.3.2.sql

Every server is read as it stands: create the extensions there first (`--create-extensions` does it).
`--check` writes nothing and fails when the files would change.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
from extension_script import functions_of, mentioned_in
from psycopg import sql
from system_relations import judge_relations

HERE = Path(__file__).parent
TARGET = HERE.parent / "sqlguard" / "functions"
RULES = HERE / "function_rules.toml"
CORE = ("pg_catalog", "information_schema")
# Types that no SQL expression has: whoever takes or returns one is called by the server only.
NOT_FOR_SQL = frozenset(
    {
        "internal",
        "cstring",
        "cstring[]",
        "trigger",
        "event_trigger",
        "language_handler",
        "fdw_handler",
        "index_am_handler",
        "table_am_handler",
        "tsm_handler",
    }
)

FUNCTIONS = """
SELECT coalesce(e.extname, n.nspname), p.proname,
       coalesce((SELECT string_agg(format_type(t, NULL), ',' ORDER BY o)
                 FROM unnest(p.proargtypes) WITH ORDINALITY AS a(t, o)), ''),
       p.prokind::text, p.provolatile::text, p.proisstrict,
       CASE WHEN p.proretset THEN 'setof ' ELSE '' END || format_type(p.prorettype, NULL),
       l.lanname, p.pronargdefaults, p.provariadic <> 0, coalesce(e.extversion, '')
FROM pg_proc p
JOIN pg_namespace n ON n.oid = p.pronamespace
JOIN pg_language l ON l.oid = p.prolang
LEFT JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
LEFT JOIN pg_extension e ON e.oid = d.refobjid
WHERE n.nspname IN ('pg_catalog', 'information_schema') OR e.oid IS NOT NULL
"""
OPERATORS = """
SELECT o.oprname, CASE WHEN o.oprleft = 0 THEN '' ELSE format_type(o.oprleft, NULL) END,
       format_type(o.oprright, NULL), p.proname,
       (SELECT string_agg(format_type(t, NULL), ',' ORDER BY i)
        FROM unnest(p.proargtypes) WITH ORDINALITY a(t, i))
FROM pg_operator o JOIN pg_proc p ON p.oid = o.oprcode
WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oid < 16384
"""
CASTS = """
SELECT format_type(c.castsource, NULL), format_type(c.casttarget, NULL), c.castmethod::text,
       c.castcontext::text, coalesce(p.proname, ''),
       coalesce((SELECT string_agg(format_type(t, NULL), ',' ORDER BY i)
                 FROM unnest(p.proargtypes) WITH ORDINALITY a(t, i)), '')
FROM pg_cast c LEFT JOIN pg_proc p ON p.oid = c.castfunc
WHERE c.oid < 16384
"""
RELATIONS = """
SELECT n.nspname, c.relname, c.relkind::text,
       CASE WHEN c.relkind = 'v' THEN pg_get_viewdef(c.oid) ELSE '' END
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname IN ('pg_catalog', 'information_schema') AND c.relkind IN ('r', 'v') AND c.oid < 16384
"""
SETTINGS = "SELECT name, category FROM pg_settings WHERE name NOT LIKE '%.%'"


@dataclass(frozen=True, slots=True)
class Function:
    of: str
    name: str
    args: str
    kind: str = "f"
    volatility: str = "v"
    strict: bool = False
    returns: str = "?"
    language: str = "c"
    defaults: int = 0
    variadic: bool = False
    versions: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.of, self.name, self.args)

    @property
    def signature(self) -> str:
        return f"{self.name}({self.args})"

    @property
    def for_sql(self) -> bool:
        return not NOT_FOR_SQL & {*self.args.split(","), self.returns.removeprefix("setof ")}


@dataclass(frozen=True, slots=True)
class Rule:
    of: str
    effect: str
    reason: str
    argument: int | None = None
    #: A reason that says no more than "harmless": left out of the data.
    plain: bool = False


@dataclass
class Found:
    """What all servers and scripts together have."""

    functions: dict[tuple[str, str, str], Function] = field(default_factory=dict)
    operators: dict[tuple[str, str, str], tuple[str, str, set[str]]] = field(default_factory=dict)
    casts: dict[tuple[str, str], tuple[str, str, str, str, set[str]]] = field(default_factory=dict)
    settings: dict[str, tuple[str, bool, set[str]]] = field(default_factory=dict)
    relations: dict[tuple[str, str], tuple[str, frozenset[str], set[str]]] = field(default_factory=dict)
    #: Extensions to take along.
    wanted: frozenset[str] = frozenset()

    def add(self, function: Function) -> None:
        """Merge one function: the newest server wins, but the worst volatility and the most defaults stay."""
        seen = self.functions.get(function.key)
        if seen is not None:
            function = replace(
                function,
                volatility=max(seen.volatility, function.volatility, key="isv".index),
                defaults=max(seen.defaults, function.defaults),
                versions=seen.versions | function.versions,
            )
        self.functions[function.key] = function


def read_server(found: Found, dsn: str, *, create_extensions: bool) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        major = str(conn.info.server_version // 10000)
        if create_extensions:
            _create_extensions(conn, found.wanted)
        for of, name, args, kind, vol, strict, returns, language, defaults, variadic, ext in conn.execute(
            FUNCTIONS
        ):
            versions = frozenset({ext if ext and of != "plpgsql" else major})
            function = Function(
                of, name, args, kind, vol, strict, returns, language, defaults, variadic, versions
            )
            if of in CORE or of in found.wanted:
                found.add(function)
        for name, left, right, function_name, args in conn.execute(OPERATORS):
            versions_seen = found.operators.get((name, left, right), ("", "", set()))[2]
            found.operators[name, left, right] = (function_name, args, versions_seen | {major})
        for source, target, method, context, function_name, args in conn.execute(CASTS):
            seen = found.casts.get((source, target))
            versions_of = (seen[4] if seen else set()) | {major}
            found.casts[source, target] = (method, context, function_name, args, versions_of)
        for name, category in conn.execute(SETTINGS):
            before = found.settings.get(name)
            found.settings[name] = (
                category,
                bool(before and before[1]),
                (before[2] if before else set()) | {major},
            )
        for schema, name, kind, definition in conn.execute(RELATIONS):
            mentioned, versions_of = found.relations.get((schema, name), ("", frozenset(), set()))[1:]
            mentioned |= mentioned_in(definition) if definition else frozenset()
            found.relations[schema, name] = (kind, mentioned, versions_of | {major})
        _mark_hidden_settings(found, conn)


def _create_extensions(conn: psycopg.Connection[Any], wanted: frozenset[str]) -> None:
    available = {name for (name,) in conn.execute("SELECT name FROM pg_available_extensions")}
    for name in sorted(available & wanted):
        conn.execute(sql.SQL("CREATE EXTENSION IF NOT EXISTS {} CASCADE").format(sql.Identifier(name)))


def _mark_hidden_settings(found: Found, conn: psycopg.Connection[Any]) -> None:
    """Find the settings that an ordinary role does not see; no catalog says which they are."""
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE build_functions_nobody")
        conn.execute("SET LOCAL ROLE build_functions_nobody")
        visible = {name for name, _ in conn.execute(SETTINGS)}
    for name in {name for name, _ in conn.execute(SETTINGS)} - visible:
        category, _, versions = found.settings[name]
        found.settings[name] = (category, True, versions)


# --- judging ----------------------------------------------------------------------------------------------


class Rules:
    """The rules by (of, name), with a note of those that nothing used."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.by_name: dict[tuple[str, str], Rule] = {}
        self.unused: set[tuple[str, str]] = set()
        for entry in document["rule"]:
            rule = Rule(
                entry.get("of", "pg_catalog"),
                entry["effect"],
                entry["reason"],
                entry.get("argument"),
                entry.get("plain", False),
            )
            for name in entry["names"]:
                if (rule.of, name) in self.by_name:
                    raise SystemExit(f"{rule.of}: `{name}` is judged twice")
                self.by_name[rule.of, name] = rule
        self.unused = {key for key in self.by_name if not key[1].endswith("(*)")}

    def for_function(self, function: Function) -> Rule | None:
        for name in (function.signature, function.name, "*"):
            rule = self.by_name.get((function.of, name))
            if rule is not None and (name != "*" or function.for_sql):
                self.unused.discard((function.of, name))
                # A name may be both an SQL function and, with other arguments, a support function.
                if name != function.name or function.for_sql:
                    return rule
        if not function.for_sql:
            return Rule(function.of, "internal", "")
        return Rule(function.of, "harmless", "") if function.volatility == "i" else None

    def documented(self) -> Iterator[Function]:
        """Functions that only a rule knows: `name(*)`."""
        for of, name in self.by_name:
            if name.endswith("(*)"):
                yield Function(of, name.removesuffix("(*)"), "*")


def judge(found: Found, rules: Rules) -> list[tuple[Function, Rule]]:
    judged, missing = [], []
    for function in [*found.functions.values(), *rules.documented()]:
        rule = rules.for_function(function)
        if rule is None:
            missing.append(f"{function.of}: {function.signature} is {function.volatility}")
        else:
            judged.append((function, rule))
    if missing:
        raise SystemExit("not reviewed, name them in function_rules.toml:\n  " + "\n  ".join(sorted(missing)))
    if rules.unused:
        raise SystemExit(f"rules for functions that no server has: {sorted(rules.unused)}")
    return sorted(judged, key=lambda pair: pair[0].key)


# --- writing ----------------------------------------------------------------------------------------------


def versions_text(versions: Iterable[str]) -> str:
    """`15-18`, `17-18`, `15`; extension versions as a list."""
    some = sorted(versions)
    if len(some) > 1 and all(v.isdigit() for v in some):
        numbers = [int(v) for v in some]
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{some[0]}-{some[-1]}"
    return " ".join(some)


def function_row(function: Function, rule: Rule) -> tuple[str, ...]:
    return (
        function.of,
        function.name,
        function.args,
        function.kind,
        function.volatility,
        "strict" if function.strict else "",
        function.returns,
        function.language,
        str(function.defaults or ""),
        "variadic" if function.variadic else "",
        versions_text(function.versions),
        rule.effect,
        "" if rule.argument is None else str(rule.argument),
        "" if rule.plain else rule.reason,
    )


FUNCTION_HEAD = (
    *("of", "name", "args", "kind", "volatility", "strict", "returns", "language"),
    *("defaults", "variadic", "versions", "effect", "argument", "reason"),
)


def tables(found: Found, document: dict[str, Any]) -> dict[str, list[Sequence[str]]]:
    judged = [function_row(f, r) for f, r in judge(found, Rules(document))]
    relations = judge_relations(
        {key: (kind, mentioned) for key, (kind, mentioned, _) in found.relations.items()},
        document["relation"],
        [(row[1], row[11], row[13]) for row in judged if row[0] in CORE],
    )
    settings = document["settings"]
    harmless = set(settings["harmless_categories"])
    named = set(settings["harmless_names"])
    setting_rows = [
        (
            name,
            "harmless" if not hidden and (category in harmless or name in named) else "infrastructure",
            category,
            versions_text(versions),
        )
        for name, (category, hidden, versions) in found.settings.items()
    ] + [(name, "harmless", "not in pg_settings", "15-18") for name in settings["extra_harmless"]]
    return {
        "functions.tsv": [FUNCTION_HEAD, *(row for row in judged if row[0] in CORE)],
        "extensions.tsv": [FUNCTION_HEAD, *(row for row in judged if row[0] not in CORE)],
        "operators.tsv": [
            ("name", "left", "right", "function", "args", "versions"),
            *sorted((*key, f, a, versions_text(v)) for key, (f, a, v) in found.operators.items()),
        ],
        "casts.tsv": [
            ("source", "target", "method", "context", "function", "args", "versions"),
            *sorted((*key, m, c, f, a, versions_text(v)) for key, (m, c, f, a, v) in found.casts.items()),
        ],
        "relations.tsv": [
            ("schema", "name", "kind", "versions", "effect", "reason"),
            *sorted((*k, v[0], versions_text(v[2]), *relations[k]) for k, v in found.relations.items()),
        ],
        "settings.tsv": [("name", "effect", "category", "versions"), *sorted(setting_rows)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument(
        "--dsn", action="append", required=True, help="one per major version; needs a superuser"
    )
    parser.add_argument(
        "--script", action="append", default=[], help="extension:version=path of its SQL script"
    )
    parser.add_argument("--create-extensions", action="store_true", help="create what the servers offer")
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    arguments = parser.parse_args()
    document = tomllib.loads(RULES.read_text())
    found = Found(wanted=frozenset(document["extensions"]))
    for dsn in arguments.dsn:
        read_server(found, dsn, create_extensions=arguments.create_extensions)
    for script in arguments.script:
        what, _, path = script.partition("=")
        extension, _, version = what.partition(":")
        for fields in functions_of(Path(path).read_text()):
            found.add(Function(of=extension, versions=frozenset({version}), **fields))
    stale = []
    for name, rows in tables(found, document).items():
        text = "".join("\t".join(row) + "\n" for row in rows)
        path = TARGET / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not arguments.check:
                path.write_text(text)
        print(f"{name}: {len(rows) - 1} rows{' (changed)' if name in stale else ''}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
