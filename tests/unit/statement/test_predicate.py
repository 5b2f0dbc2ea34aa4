"""Real scope: which conditions narrow a write down, and which only look so."""

import pytest
from guard_world import read

from sqlguard.statement.model import Scope

ALL = """
true
1 = 1
't'
(1)::bool
NOT false
NOT (1 = 2)
NULL IS NULL
1 IN (1, 2)
'a' LIKE 'a' OR true
id = id
id = accounts.id
id <= id
NOT (id <> id)
id IS NOT NULL
id = 5 OR 1 = 1
id = 5 OR NOT (1 = 2)
id > 5 OR id <= 5
id > 5 OR id < 6
id > 5 OR NOT (id > 5)
id <> 5 OR id = 5
id BETWEEN -2147483648 AND 2147483647
id >= -2147483648
id < 99999999999
id BETWEEN SYMMETRIC 2147483647 AND -2147483648
id + 0 = id
id + 1 > id
id * 1 = id
id - id = 0
id::bigint = id
coalesce(id, 0) = id
coalesce(id > 5, true) OR id <= 5
owner_name LIKE '%'
owner_name ILIKE '%%'
owner_name SIMILAR TO '%'
owner_name ~ '.*'
owner_name ^@ ''
owner_name >= ''
owner_name || '' = owner_name
length(owner_name) >= 0
status = status OR status IS NULL
status = 'a' OR status <> 'a' OR status IS NULL
status IS NULL OR status IS NOT NULL
deleted IN (true, false)
deleted OR NOT deleted
deleted IS NOT UNKNOWN
deleted = true OR deleted = false
coalesce(deleted, false) IN (true, false)
(id > 5) IS NOT UNKNOWN
(id > 5) IS NOT NULL
CASE WHEN id > 5 THEN true ELSE true END
CASE WHEN true THEN true ELSE id = 5 END
CASE id WHEN 5 THEN true ELSE id <> 5 END
id IS NOT DISTINCT FROM id
id IS DISTINCT FROM NULL
(id, 1) = (id, 1)
ROW(id) = ROW(id)
id = ANY (ARRAY[id])
id IN (id, 5)
ctid IS NOT NULL
tableoid = 'app.accounts'::regclass
random() < 2
now() > '2000-01-01'
current_user = current_user
$1
$1 = $2
EXISTS (SELECT 1)
EXISTS (SELECT 1 FROM orders WHERE status = 'new')
NOT EXISTS (SELECT 1 FROM orders WHERE orders.account_id = -1)
id IN (SELECT id FROM accounts)
id IN (SELECT b.id FROM app.accounts b)
id IN (SELECT id FROM (SELECT * FROM accounts) s)
id IN (SELECT id FROM (SELECT id FROM accounts) s)
id = ANY (ARRAY(SELECT id FROM accounts))
EXISTS (SELECT 1 FROM accounts b WHERE b.id = accounts.id)
5 IN (SELECT id FROM orders)
created_at > '-infinity'
created_at <= 'infinity' OR created_at IS NULL
id = 5 OR random() < 2
id IN (SELECT accounts.id FROM orders)
id IN (SELECT b.id FROM accounts b JOIN orders o ON true)
id IN (SELECT b.id FROM accounts b LEFT JOIN orders o ON o.account_id = b.id)
deleted IS TRUE OR deleted IS NOT TRUE
id > 0 OR id = 0 OR id < 0
id NOT IN (SELECT 1 WHERE false) OR true
""".strip().splitlines()
NARROWED = """
id = 5
5 = id
accounts.id = 5
id IN (1, 2, 3)
id = ANY (ARRAY[1, 2])
id = $1
id IN ($1, $2)
id = 5 AND status = 'x'
1 = 1 AND id = 5
id = 5 OR id = 6
id = (SELECT max(id) FROM orders)
id + 1 = 5
false
NULL
id = 5 AND false
id <> id
status = NULL
id BETWEEN 3 AND 5
CURRENT OF c
id = 5 AND EXISTS (SELECT 1)
""".strip().splitlines()
MEASURED = """
id > 5
status = 'x'
status IS NULL
email IS NOT NULL
status IN ('a', 'b')
owner_name LIKE 'a%'
id % 2 = 0
id = 5 OR status = 'x'
id = ANY ($1)
deleted
NOT deleted
id IN (SELECT account_id FROM orders)
EXISTS (SELECT 1 FROM orders o WHERE o.account_id = accounts.id)
NOT EXISTS (SELECT 1 FROM orders o WHERE o.account_id = accounts.id)
id NOT IN (SELECT account_id FROM orders)
id IN (SELECT id FROM accounts WHERE status = 'x')
id IN (SELECT id FROM accounts ORDER BY id LIMIT 5)
EXISTS (SELECT 1 FROM accounts b WHERE b.parent_id = accounts.id)
id IN (SELECT b.id FROM accounts b JOIN orders o ON o.account_id = b.id WHERE o.status = 'x')
id IN (SELECT b.id FROM accounts b JOIN orders o ON o.account_id = b.id)
id IN (SELECT b.id FROM accounts b LEFT JOIN orders o ON o.account_id = b.id WHERE o.id IS NULL)
id IN (SELECT id FROM accounts b JOIN orders o USING (id) WHERE o.status = 'x')
EXISTS (SELECT 1 FROM accounts b JOIN orders o ON o.account_id = b.id WHERE b.id = accounts.id AND o.status = 'x')
meta @> '{"a": 1}'
created_at < now() - interval '1 year'
$1 IS NULL OR status = $1
coalesce(status, 'x') = 'x'
CASE WHEN id > 5 THEN status = 'x' ELSE false END
(id, status) = (5, 'x') OR status = 'y'
balance < 0
lower(email) = 'x'
""".strip().splitlines()


def scope(condition: str) -> Scope:
    (write,) = read(f"UPDATE accounts SET balance = 0 WHERE {condition}").writes
    return write.scope


@pytest.mark.parametrize("condition", ALL)
def test_all_rows(condition: str) -> None:
    assert scope(condition) is Scope.ALL


@pytest.mark.parametrize("condition", NARROWED)
def test_few_rows(condition: str) -> None:
    assert scope(condition) is Scope.NARROWED


@pytest.mark.parametrize("condition", MEASURED)
def test_what_only_a_count_can_tell(condition: str) -> None:
    assert scope(condition) is Scope.MEASURED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("UPDATE accounts SET balance = 0", Scope.ALL),
        ("DELETE FROM orders", Scope.ALL),
        ("UPDATE accounts a SET balance = 0 FROM orders o WHERE o.account_id = o.account_id", Scope.ALL),
        ("UPDATE accounts SET balance = 0 FROM accounts b WHERE b.id = 1", Scope.ALL),
        ("UPDATE accounts SET balance = 0 FROM accounts b WHERE b.id = accounts.id", Scope.ALL),
        (
            "UPDATE accounts SET balance = 0 FROM (SELECT id FROM accounts) b WHERE b.id = accounts.id",
            Scope.ALL,
        ),
        (
            "WITH b AS (TABLE accounts) UPDATE accounts SET balance = 0 FROM b WHERE b.id = accounts.id",
            Scope.ALL,
        ),
        (
            "UPDATE accounts SET balance = 0 FROM accounts b JOIN orders o USING (id) WHERE b.id = accounts.id AND o.id > 5",
            Scope.MEASURED,
        ),
        (
            "UPDATE accounts SET balance = 0 FROM accounts b JOIN orders o ON true WHERE b.id = accounts.id",
            Scope.ALL,
        ),
        (
            "DELETE FROM orders o USING orders p LEFT JOIN accounts a ON a.id = p.id WHERE p.id = o.id AND a.id IS NULL",
            Scope.MEASURED,
        ),
        ("DELETE FROM orders o USING orders p WHERE p.id = 1", Scope.ALL),
        ("DELETE FROM orders o USING orders p WHERE p.id = o.id", Scope.ALL),
        ("UPDATE accounts a SET balance = 0 FROM orders o WHERE o.account_id = a.id", Scope.MEASURED),
        (
            "UPDATE accounts SET balance = 0 FROM accounts b WHERE b.id = accounts.id AND b.status = 'x'",
            Scope.MEASURED,
        ),
        (
            "UPDATE accounts a SET balance = 0 FROM orders o WHERE o.account_id = a.id AND a.id = 5",
            Scope.NARROWED,
        ),
        (
            "MERGE INTO accounts USING (SELECT 1) s ON true WHEN MATCHED THEN UPDATE SET balance = 0",
            Scope.ALL,
        ),
        ("MERGE INTO orders o USING accounts a ON a.id = 1 WHEN MATCHED THEN DELETE", Scope.ALL),
        (
            "MERGE INTO orders o USING (SELECT 5 AS id) s ON o.id = s.id WHEN MATCHED THEN DELETE",
            Scope.MEASURED,
        ),
        ("MERGE INTO orders o USING orders p ON o.id = p.id WHEN MATCHED THEN DELETE", Scope.ALL),
        (
            "MERGE INTO orders o USING accounts a ON o.id = a.id WHEN NOT MATCHED BY SOURCE THEN DELETE",
            Scope.ALL,
        ),
        ("UPDATE ONLY docs SET title = 'x' WHERE id = 1", Scope.NARROWED),
    ],
)
def test_joins(text: str, expected: Scope) -> None:
    (write,) = [w for w in read(text).writes if w.op != "insert"]
    assert write.scope is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("INSERT INTO kv VALUES ('a', 'b') ON CONFLICT (k) DO UPDATE SET v = 'x'", Scope.NARROWED),
        ("INSERT INTO kv SELECT * FROM kv ON CONFLICT (k) DO UPDATE SET v = 'x'", Scope.ALL),
        (
            "INSERT INTO kv SELECT * FROM kv WHERE k = 'a' ON CONFLICT (k) DO UPDATE SET v = 'x'",
            Scope.NARROWED,
        ),
        ("INSERT INTO kv SELECT title FROM docs ON CONFLICT (k) DO UPDATE SET v = 'x'", Scope.MEASURED),
    ],
)
def test_upserts(text: str, expected: Scope) -> None:
    (write,) = [w for w in read(text).writes if w.op == "update"]
    assert write.scope is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT * FROM accounts FOR UPDATE", [Scope.ALL]),
        ("SELECT * FROM accounts WHERE id = 1 FOR UPDATE", [Scope.NARROWED]),
        ("SELECT * FROM accounts LIMIT 1 FOR UPDATE SKIP LOCKED", [Scope.MEASURED]),
        (
            "SELECT * FROM accounts a JOIN orders o ON o.account_id = a.id WHERE a.id = 1 FOR UPDATE OF a",
            [Scope.NARROWED],
        ),
    ],
)
def test_row_locks(text: str, expected: list[Scope]) -> None:
    statement = read(text)
    assert statement.locks_rows
    assert [scope for _, scope in statement.details["locks"]] == expected
