"""
A scripted day of an agent, as data: every driver plays the same steps, and what it sees is compared.

A step is a way of sending and a text. Parameters are written `$1`, as PostgreSQL has them; a player turns them into
what its driver takes. What a step shows is rows and the number of rows or the command's tag, or the error's SQLSTATE.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Way(StrEnum):
    """How a step is sent."""

    PLAIN = "plain"
    PARAMS = "params"
    #: The same statement three times, prepared by the driver.
    PREPARED = "prepared"
    #: Once per list of parameters, in a batch if the driver has one.
    MANY = "many"
    #: By the driver's own cursor, seven rows at a time.
    CURSOR = "cursor"
    COPY_OUT = "copy out"
    #: The parameters are the pieces that the data is sent in.
    COPY_IN = "copy in"
    #: As before, and then the client has no more and says so.
    COPY_BROKEN = "copy broken"
    #: The parameters are rows; in binary where the driver writes that.
    COPY_ROWS = "copy rows"
    #: Cancelled while it runs.
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Step:
    way: Way
    text: str
    params: tuple[Any, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"way": self.way.value, "text": self.text, "params": self.params}


def plain(*texts: str) -> list[Step]:
    return [Step(Way.PLAIN, text) for text in texts]


def params(text: str, *values: Any) -> Step:
    return Step(Way.PARAMS, text, values)


def prepared(text: str, *values: Any) -> Step:
    return Step(Way.PREPARED, text, values)


def copy_in(text: str, *pieces: str) -> Step:
    return Step(Way.COPY_IN, text, pieces)


READS = [
    *plain(
        "SELECT count(*) FROM customers",
        "SELECT id, name, city, joined_on FROM customers WHERE id BETWEEN 1 AND 7 ORDER BY id",
        "SELECT c.name, count(o.id), sum(o.total) FROM customers c LEFT JOIN orders o ON o.customer_id = c.id"
        " WHERE c.id < 5 GROUP BY c.id, c.name ORDER BY c.id",
        "SELECT id FROM customers WHERE id < 0",
        "WITH busy AS (SELECT customer_id FROM orders GROUP BY customer_id HAVING count(*) > 3)"
        " SELECT count(*) FROM busy",
        "SELECT status, count(*) FROM orders GROUP BY ROLLUP (status) ORDER BY status NULLS LAST",
        "SELECT '{\"a\": [1, 2]}'::jsonb, ARRAY['x', NULL], 12.50::numeric, true, NULL::date, interval '1 day'",
        "SELECT id, row_number() OVER (PARTITION BY status ORDER BY id) FROM orders WHERE id < 9 ORDER BY id",
        "VALUES (1, 'one'), (2, 'two')",
        "SHOW server_encoding",
    ),
    params("SELECT id, email FROM customers WHERE id = $1", 17),
    params("SELECT $1::text || $2::text", "a", "é"),
    prepared("SELECT name FROM products WHERE id = $1", 11),
]
WRITES = [
    *plain(
        "INSERT INTO customers VALUES (9001, 'New', 'new@shop.example', NULL, '2024-05-05') RETURNING id, name",
        "UPDATE orders SET note = 'seen', status = 'paid' WHERE id IN (3, 4, 5) RETURNING id, note",
        "UPDATE orders SET note = 'seen' WHERE id < 0",
        "INSERT INTO staff VALUES (1, 'Clerk 1') ON CONFLICT (id) DO NOTHING",
        "INSERT INTO staff VALUES (2, 'Chief') ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name RETURNING name",
        "SELECT name FROM staff WHERE id = 2",
        "DELETE FROM items WHERE order_id = 77",
        "DELETE FROM items WHERE order_id = 77",
        "DELETE FROM customers WHERE id = 42 RETURNING id, name, city",
        "SELECT count(*) FROM customers WHERE id = 42",
        "SELECT count(*) FROM orders WHERE customer_id = 42",
        "SELECT count(*) FROM items",
        "DELETE FROM orders AS o USING customers AS c WHERE c.id = o.customer_id AND c.id = 43 RETURNING o.id",
        "WITH gone AS (DELETE FROM orders WHERE id = 100 RETURNING id) SELECT count(*) FROM gone",
    ),
    params("UPDATE customers SET city = $1 WHERE id = $2", "Quito", 18),
    params("INSERT INTO plain (id, t, a) VALUES ($1, $2, $3) RETURNING id, t, a", 1, "naïve", [1, 2]),
    params("DELETE FROM customers WHERE id = $1 RETURNING name", 44),
    prepared("UPDATE orders SET note = note || '.' WHERE id = $1 RETURNING note", 3),
    prepared("DELETE FROM customers WHERE id = $1", 45),
    Step(
        Way.MANY,
        "INSERT INTO plain (id, t) VALUES ($1, $2)",
        tuple((number, f"row {number}") for number in range(100, 120)),
    ),
    *plain("SELECT count(*), min(t), max(t) FROM plain"),
]
#: Each fails, outside a transaction; the session goes on.
ERRORS = [
    *plain(
        "INSERT INTO staff VALUES (1, 'again')",
        "INSERT INTO orders (id, customer_id, placed_on) VALUES (9100, 99999, '2024-01-01')",
        "UPDATE items SET quantity = 0 WHERE id = 5",
        "UPDATE customers SET name = NULL WHERE id = 5",
        "UPDATE orders SET total = 1 / 0 WHERE id = 5",
        "SELECT nmae FROM customers",
        "SELECT 1 FROM nowhere",
        "SELEC 1",
        "DELETE FROM customers WHERE nmae = 'x'",
        "SELECT 'x'::integer",
        "EXECUTE unheard_of",
        "ROLLBACK TO SAVEPOINT nowhere",
        "SELECT 1",
    ),
    params("SELECT 10 / $1::integer", 0),
]
TRANSACTIONS = [
    *plain(
        "BEGIN",
        "UPDATE orders SET note = 'lost' WHERE id = 200",
        "DELETE FROM customers WHERE id = 60",
        "SELECT count(*) FROM customers WHERE id = 60",
        "ROLLBACK",
        "SELECT count(*) FROM customers WHERE id = 60",
        "BEGIN ISOLATION LEVEL SERIALIZABLE",
        "UPDATE orders SET note = 'kept' WHERE id = 201",
        "SAVEPOINT one",
        "UPDATE orders SET note = 'lost' WHERE id = 202",
        "SELECT 1 / 0",
        "SELECT 1",
        "ROLLBACK TO SAVEPOINT one",
        "SELECT note FROM orders WHERE id IN (201, 202) ORDER BY id",
        "RELEASE SAVEPOINT one",
        "COMMIT",
        "BEGIN READ ONLY",
        "UPDATE orders SET note = 'lost' WHERE id = 203",
        "COMMIT",
        "START TRANSACTION",
        "INSERT INTO staff VALUES (50, 'Temp')",
        "SELECT nothing FROM staff",
        "INSERT INTO staff VALUES (51, 'Temp')",
        "COMMIT",
        "SELECT count(*) FROM staff WHERE id >= 50",
        "SET LOCAL statement_timeout = '5s'",
        "SELECT id, note FROM orders WHERE id BETWEEN 200 AND 203 ORDER BY id",
    ),
]
CURSORS = [
    *plain(
        "BEGIN",
        "DECLARE walk SCROLL CURSOR FOR SELECT id, status FROM orders ORDER BY id",
        "FETCH 3 FROM walk",
        "MOVE FORWARD 10 IN walk",
        "FETCH BACKWARD 2 FROM walk",
        "CLOSE walk",
        "FETCH 1 FROM walk",
        "ROLLBACK",
    ),
    Step(Way.CURSOR, "SELECT id, name FROM customers WHERE id < 30 ORDER BY id"),
]
COPIES = [
    Step(Way.COPY_OUT, "COPY (SELECT id, status, note FROM orders WHERE id < 10 ORDER BY id) TO STDOUT"),
    Step(Way.COPY_OUT, "COPY staff (id, name) TO STDOUT (FORMAT csv, HEADER)"),
    Step(Way.COPY_OUT, "COPY (SELECT 1 / (id - 5) FROM orders ORDER BY id) TO STDOUT"),
    copy_in(
        "COPY plain (id, t, n, a) FROM STDIN",
        "300\ta\\tb\t1.50\t{1,NULL}\n301\tn",
        "aïve\t\\N\t{}\n302\t\t0\t\\N\n",
    ),
    copy_in("COPY plain (t, id) FROM STDIN (FORMAT csv)", '"two\nlines, ""quoted""",310\n', "x,311\n,312\n"),
    copy_in("COPY staff FROM STDIN", "70\tClerk 70\n71\tClerk 71\n"),
    copy_in("COPY staff FROM STDIN"),
    copy_in(
        "COPY customers (id, name, email, city, joined_on) FROM STDIN",
        *(f"{n}\tCustomer {n}\t{n}@shop.example\t\\N\t2024-05-05\n" for n in range(9500, 9800)),
    ),
    Step(
        Way.COPY_ROWS,
        "COPY plain (id, t) FROM STDIN",
        tuple((number, f"row {number}") for number in range(400, 450)),
    ),
    Step(Way.COPY_BROKEN, "COPY staff FROM STDIN", ("80\tClerk 80\n", "81\tCl")),
    # Not a number, too few columns, a key that is there, a customer that is not, a quantity that may not be, no column.
    copy_in("COPY plain (id, t) FROM STDIN", "320\ta\nx\tb\n"),
    copy_in("COPY plain (id, t) FROM STDIN", "320\ta\n321\n"),
    copy_in("COPY staff FROM STDIN", "82\tClerk 82\n70\tagain\n"),
    copy_in("COPY orders (id, customer_id, placed_on) FROM STDIN", "9200\t99999\t2024-01-01\n"),
    copy_in("COPY items (id, order_id, product_id, quantity, price) FROM STDIN", "99990\t3\t1\t0\t1\n"),
    copy_in("COPY plain (id, nmae) FROM STDIN", "320\ta\n"),
    *plain("SELECT count(*), min(t), max(t) FROM plain WHERE id BETWEEN 300 AND 450", "BEGIN"),
    copy_in("COPY staff FROM STDIN", "90\tTemp\n"),
    *plain(
        "UPDATE staff SET name = 'Temp 2' WHERE id = 90 RETURNING name",
        "SAVEPOINT one",
    ),
    copy_in("COPY staff FROM STDIN", "90\tagain\n"),
    copy_in("COPY staff FROM STDIN", "91\tTemp\n"),
    *plain("ROLLBACK TO SAVEPOINT one"),
    copy_in("COPY staff FROM STDIN", "92\tTemp\n"),
    *plain("COMMIT", "BEGIN"),
    copy_in("COPY staff FROM STDIN", "93\tlost\n"),
    *plain(
        "ROLLBACK", "DELETE FROM customers WHERE id BETWEEN 9500 AND 9600", "SELECT count(*) FROM customers"
    ),
]
CANCELS = [
    Step(
        Way.CANCEL,
        "SELECT count(*) FROM generate_series(1, 3000) a, generate_series(1, 3000) b, generate_series(1, 300) c",
    ),
    *plain("SELECT 'goes on'"),
]
#: What is left of it all, as a client sees it.
LAST = plain(
    "SELECT id, name, email, city, joined_on FROM customers ORDER BY id",
    "SELECT id, customer_id, handled_by, status, total, note, placed_on FROM orders ORDER BY id",
    "SELECT id, order_id, product_id, quantity, price FROM items ORDER BY id",
    "SELECT id, t, b, n, a FROM plain ORDER BY id",
    "SELECT id, name FROM staff ORDER BY id",
)
DAY = [*READS, *WRITES, *ERRORS, *TRANSACTIONS, *CURSORS, *COPIES, *CANCELS, *LAST]
