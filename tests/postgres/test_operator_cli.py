"""What a person who runs the commands for the first time sees: messages, exit statuses, tables, and no password."""

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from servers import Database

from sqlguard.cli import main, output
from sqlguard.ports import free_port
from sqlguard.postgres.proxies import announced

#: Status, standard output and standard error of one command.
Told = tuple[int, str, str]
Command = Callable[..., Told]
POLICY = """
name = "support"
description = "answers tickets"
[defaults]
max_ttl = "10min"
[tables."public.orders"]
select = true
update = ["status"]
delete = "soft"
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    for name in ("SQLGUARD_DSN", "SQLGUARD_LISTEN", "SQLGUARD_PUBLIC_HOST"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "support.toml").write_text(POLICY, encoding="utf-8")

    def run(*words: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["sqlguard", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run


@pytest.fixture
def shop(database: Database, command: Command) -> Callable[..., Told]:
    """A migrated database with a guarded table, an unguarded one, and the policy `support`."""
    with database.connect(database.owner_dsn) as owner:
        owner.execute(
            "CREATE TABLE orders (id integer PRIMARY KEY, status text); CREATE TABLE loose (t text)"
        )
        owner.execute("INSERT INTO orders SELECT n, 'new' FROM generate_series(1, 30) n")

    def run(*words: str) -> Told:
        return command(*words, "--dsn", database.owner_dsn)

    assert run("migrate")[0] == 0
    assert run("guard", "orders")[0] == 0
    assert run("policy", "apply", "./support.toml")[0] == 0
    return run


@pytest.mark.parametrize(
    "dsn",
    [
        "postgres//owner:s3cr3t@localhost/shop",
        "postgresql://owner:s3c@r3t@localhost/shop",
        "postgresql://owner:s3c/r3t@localhost/shop",
        "postgresql://owner:s3c%zr3t@localhost/shop",
        'postgresql://owner:s3c"r3t@[localhost/shop',
        "host=localhost password='s3cr3t dbname=shop",
        "postgresql://owner:s3cr3t@localhost/shop?unheard=s3cr3t",
    ],
)
@pytest.mark.parametrize("words", [("migrate",), ("guard", "orders"), ("serve",), ("journal", "list")])
def test_a_malformed_dsn_is_a_message_without_the_password(
    command: Command, dsn: str, words: tuple[str, ...]
) -> None:
    status, said, complained = command(*words, "--dsn", dsn)
    assert (status, said) == (2, "")
    assert "s3c" not in complained
    assert "r3t" not in complained
    assert "Traceback" not in complained
    assert "hint" in complained
    assert "58000" not in complained


def test_no_dsn_is_a_usage_error(command: Command) -> None:
    status, _, complained = command("tables")
    assert status == 2
    assert "SQLGUARD_DSN" in complained


@pytest.mark.parametrize(
    "words",
    [
        ("guard", "orders"),
        ("unguard", "orders"),
        ("tables",),
        ("journal", "list"),
        ("journal", "verify"),
        ("undo", "--task", "x"),
        ("history", "orders", "1"),
        ("task", "open", "--agent", "a", "--policy", "p"),
        ("task", "list"),
        ("task", "end", "x"),
        ("policy", "apply", "./support.toml"),
        ("policy", "list"),
        ("freeze", "--reason", "x"),
        ("thaw",),
        ("restore", "--action", "1"),
        ("preview", "SELECT 1", "--task", "x"),
        ("exec", "SELECT 1", "--task", "x"),
        ("serve",),
    ],
)
def test_a_forgotten_migrate_is_said(database: Database, command: Command, words: tuple[str, ...]) -> None:
    status, _, complained = command(*words, "--dsn", database.owner_dsn)
    assert status == 1
    assert "run `sqlguard migrate`" in complained


def test_migrate_twice(database: Database, command: Command) -> None:
    assert "applied" in command("migrate", "--dsn", database.owner_dsn)[1]
    assert "nothing to do" in command("migrate", "--dsn", database.owner_dsn)[1]


def test_version(command: Command) -> None:
    status, said, _ = command("--version")
    assert status == 0
    assert said.startswith("sqlguard ")


def test_freeze_and_thaw_in_words(shop: Command) -> None:
    assert (
        "frozen: public.orders until "
        in shop("freeze", "--reason", "release", "--tables", "orders", "--for", "2h")[1]
    )
    assert "frozen: all tables;" in shop("freeze", "--reason", "fire")[1]
    thawed = shop("thaw")[1].splitlines()
    assert [line.partition(" (")[0].partition(" until")[0] for line in thawed] == [
        "thawed: public.orders",
        "thawed: all tables",
    ]
    assert "fire" in thawed[1]
    assert shop("thaw")[1] == "nothing was frozen\n"


def test_what_is_guarded(shop: Command) -> None:
    status, said, complained = shop("tables")
    lines = [line.split("\t") for line in said.splitlines()]
    assert status == 0
    assert lines[0] == ["table", "mode", "key", "policies", "guarded"]
    assert lines[1][:4] == ["public.orders", "soft", "id", "support v1"]
    assert "1 table(s) are not guarded" in complained
    found = json.loads(shop("tables", "--all", "--json")[1])["tables"]
    assert [(t["table"], t["mode"]) for t in found] == [("public.loose", None), ("public.orders", "soft")]
    assert "nothing to do: is soft" in shop("guard", "orders", "--mode", "auto")[1]


def test_policies_with_their_versions(shop: Command, tmp_path: Path) -> None:
    task = json.loads(shop("task", "open", "--agent", "a", "--policy", "support", "--json")[1])["task"]
    (tmp_path / "support.toml").write_text(POLICY.replace("10min", "20min"), encoding="utf-8")
    shop("policy", "apply", "./support.toml")
    found = json.loads(shop("policy", "list", "--json")[1])["policies"]
    assert [(p["version"], p["latest"], p["open_tasks"], p["tables"]) for p in found] == [
        (1, False, 1, 1),
        (2, True, 0, 1),
    ]
    shop("task", "end", task)
    assert [line.split("\t")[1] for line in shop("policy", "list")[1].splitlines()[1:]] == ["2"]
    assert len(shop("policy", "list", "--all")[1].splitlines()) == 3


def test_a_terminal_gets_a_table_or_where_that_is_too_wide_one_value_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        output, "out", Console(force_terminal=True, width=60, color_system=None, soft_wrap=True)
    )
    output.print_rows(("a", "b"), [(1, "x"), (2, None)])
    assert capsys.readouterr().out.split() == ["a", "b", "1", "x", "2"]
    output.print_rows(("number", "statement"), [(1, "SELECT " + "x" * 80)])
    assert capsys.readouterr().out.splitlines() == [
        "row 1 of 1",
        "number     1",
        "statement  SELECT " + "x" * 80,
    ]


def test_a_pipe_gets_whole_values_in_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_rows(("a", "b"), [("one\ttwo\nthree", "y" * 500), (None, {"k": [1]})])
    assert capsys.readouterr().out.splitlines() == [
        "a\tb",
        "one\\ttwo\\nthree\t" + "y" * 500,
        '\t{"k": [1]}',
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("undo", "--task", "nobody"), "task `nobody`"),
        (("undo", "--task", "nobody", "--preview"), "task `nobody`"),
        (("undo", "--action", "999"), "action `999`"),
        (("undo", "--undo", "999"), "undo `999`"),
        (("journal", "list", "--task", "nobody"), "task `nobody`"),
        (("journal", "list", "--agent", "nobody"), "agent `nobody`"),
        (("journal", "verify", "--task", "nobody"), "task `nobody`"),
        (("journal", "show", "999"), "999"),
        (("journal", "list", "--table", "nobody"), "table `nobody`"),
        (("history", "nobody", "1"), "`nobody`"),
        (
            ("history", "orders", "one"),
            'no key of `public.orders`: invalid input syntax for type integer: "one"',
        ),
    ],
)
def test_a_typo_is_no_empty_answer(shop: Command, words: tuple[str, ...], named: str) -> None:
    status, said, complained = shop(*words)
    assert (status, said) == (1, "")
    assert named in complained
    assert "hint" in complained


def test_a_policy_file_that_is_not_there(shop: Command, command: Command, tmp_path: Path) -> None:
    for words in (("policy", "apply", "NOPE", "--dsn", "postgresql://nowhere"), ("policy", "check", "NOPE")):
        status, said, complained = command(*words)
        assert (status, said) == (2, "")
        assert "there is no policy file `policies/NOPE.toml`" in complained
        assert "sqlguard init" in complained
        assert "Errno" not in complained
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "clerk.toml").write_text('name = "clerk"', encoding="utf-8")
    assert "`policies` has `clerk`" in shop("policy", "apply", "NOPE")[2]
    assert "is a directory" in command("policy", "check", "./policies")[2].lower()


def test_nothing_done_yet_is_no_error(shop: Command) -> None:
    task = json.loads(shop("task", "open", "--agent", "a", "--policy", "support", "--json")[1])["task"]
    assert shop("undo", "--task", task)[0] == 0
    assert shop("journal", "list", "--task", task)[0] == 0
    for table in ("orders", "public.orders", "loose"):
        assert shop("journal", "list", "--table", table)[0] == 0
    assert shop("history", "orders", "1")[:2] == (0, "the journal has no change of this row\n")


def test_a_parameter_that_scopes_nothing_is_said(shop: Command) -> None:
    words = ("task", "open", "--agent", "a", "--policy", "support", "--json")
    told = json.loads(shop(*words, "--param", "custmer=7", "--param", "region=1")[1])
    assert "no row scope of policy `support` asks for `custmer`, `region`" in told["warnings"]
    assert not any("row scope" in text for text in json.loads(shop(*words)[1])["warnings"])


GUARDING = """
name = "clerk"
[tables."public.plain"]
select = true
insert = true
delete = "soft"
[tables."public.watched"]
update = true
delete = "soft"
[tables."public.keyless"]
insert = true
delete = "soft"
[tables."public.ledger"]
insert = true
"""


def test_policy_apply_guards_as_the_policy_says_and_warns_where_it_can_not(
    database: Database, command: Command, tmp_path: Path
) -> None:
    with database.connect(database.owner_dsn) as owner:
        owner.execute("""
            CREATE TABLE plain (id integer PRIMARY KEY);
            CREATE TABLE watched (id integer PRIMARY KEY);
            CREATE TABLE keyless (t text);
            CREATE TABLE ledger (id integer PRIMARY KEY);
            CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
            CREATE TRIGGER t BEFORE DELETE ON watched FOR EACH ROW EXECUTE FUNCTION f();
        """)
    (tmp_path / "clerk.toml").write_text(GUARDING, encoding="utf-8")
    command("migrate", "--dsn", database.owner_dsn)
    modes = {
        "public.keyless": "journal",
        "public.ledger": "journal",
        "public.plain": "soft",
        "public.watched": "journal",
    }
    statements = []
    for flags in (["--dry-run"], []):
        told = command("policy", "apply", "./clerk.toml", *flags, "--json", "--dsn", database.owner_dsn)[1]
        (clerk,) = json.loads(told)["policies"]
        assert {g["table"]: g["mode"] for g in clerk["guards"]} == modes
        statements.append(clerk["statements"])
        assert len(clerk["warnings"]) == 2
        assert "primary_key_missing" in clerk["warnings"][0]
        assert "no DELETE is granted" in clerk["warnings"][1]
        assert "trigger `t`" in clerk["warnings"][1]
    # What a dry run shows is what is run, with the grants that need the guards.
    assert statements[0] == statements[1]
    assert any('INSERT ("id"), UPDATE ("deleted_at", "deleted_by_agent")' in text for text in statements[0])
    found = json.loads(command("tables", "--json", "--dsn", database.owner_dsn)[1])["tables"]
    assert {t["table"]: t["mode"] for t in found} == modes
    _, said, complained = command("policy", "apply", "./clerk.toml", "--dsn", database.owner_dsn)
    assert "guarded as journal, the policy says soft: no delete is granted" in said
    assert "policy refresh" in complained


def test_a_time_that_the_policy_cuts_is_said(shop: Command) -> None:
    words = ("task", "open", "--agent", "a", "--policy", "support")
    status, _, complained = shop(*words, "--ttl", "8h")
    assert status == 0
    assert "not 8h as asked for: policy `support` lets the task live until" in complained
    told = json.loads(shop(*words, "--ttl", "8h", "--json")[1])
    assert any("max_ttl" in text for text in told["warnings"])
    assert "max_ttl" not in shop(*words, "--ttl", "9min")[2]
    assert "max_ttl" in shop("task", "renew", told["task"], "--ttl", "8h")[2]


def test_task_open_prints_where_a_proxy_said_it_listens(
    database: Database, shop: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLGUARD_LISTEN", f"127.0.0.1:{free_port()}")  # 6543 may be somebody's
    words = ("task", "open", "--agent", "a", "--policy", "support", "--json")
    told = json.loads(shop(*words)[1])
    assert "sqlguard serve" in " ".join(told["warnings"])
    gone = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with (
            announced(database.owner_dsn, f"127.0.0.1:{port}"),
            announced(database.owner_dsn, f"127.0.0.1:{gone.getsockname()[1]}"),
        ):
            gone.close()
            told = json.loads(shop(*words)[1])
    assert f"@127.0.0.1:{port}/" in told["dsn"]
    assert told["warnings"] == []
    assert database.execute("SELECT count(*) FROM sqlguard.proxy") == [(0,)]


def test_check_knows_applied_policies(shop: Command, command: Command) -> None:
    status, said, _ = shop("check", "--policy", "support", "DELETE FROM orders WHERE id = 1")
    assert (status, said.split()[0]) == (0, "rewrite")
    status, _, complained = shop("check", "--policy", "nobody", "SELECT 1")
    assert status == 2
    assert "none of that name was applied" in complained
    mysql = ("check", "--policy", "support", "--dialect", "mysql", "DELETE FROM `orders` WHERE id = 1")
    assert shop(*mysql)[1].split()[0] == "rewrite"
    assert "no database was named" in command("check", "--policy", "support", "SELECT 1")[2]
