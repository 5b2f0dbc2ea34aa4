"""node-postgres through the proxy, installed into a folder of the test's own."""

import json
from pathlib import Path
from typing import Any

from end_to_end.node import run_node
from end_to_end.wired import Agent, Wired

SCRIPT = """
const { Client, Pool } = require('pg');
const seen = {};
async function main() {
  const client = new Client(JSON.parse(process.argv[2]));
  await client.connect();
  seen.count = (await client.query('SELECT count(*)::int AS n FROM customers')).rows[0].n;
  const gone = await client.query('DELETE FROM customers WHERE id = $1 RETURNING id, name', [150]);
  seen.gone = [gone.command, gone.rowCount, gone.rows[0].name];
  const named = { name: 'n1', text: 'UPDATE orders SET note = $1 WHERE id = $2', values: ['node', 90] };
  seen.named = [(await client.query(named)).rowCount, (await client.query({ ...named, values: ['again', 91] })).rowCount];
  await client.query('BEGIN');
  await client.query("UPDATE orders SET note = 'lost' WHERE id = 92");
  await client.query('ROLLBACK');
  seen.several = (await client.query('SELECT 1 AS a; SELECT 2 AS b')).map((r) => r.rows[0]);
  for (const sql of ['DROP TABLE orders', 'SELECT nmae FROM orders']) {
    try { await client.query(sql); } catch (e) { (seen.errors ??= []).push([e.code, Boolean(e.hint), e.position ?? null]); }
  }
  seen.types = (await client.query("SELECT $1::jsonb AS j, $2::bytea AS b, $3::timestamptz IS NULL AS n",
    [{ a: [1] }, Buffer.from([0, 255]), null])).rows[0];
  await client.end();
  const pool = new Pool({ ...JSON.parse(process.argv[2]), max: 3 });
  seen.pool = (await Promise.all(Array.from({ length: 20 }, (_, n) =>
    pool.query('SELECT $1::int AS n', [n])))).map((r) => r.rows[0].n);
  await pool.end();
  console.log(JSON.stringify(seen));
}
main().catch((e) => { console.error(e); process.exit(1); });
"""


def test_a_day_of_node_postgres(wired_world: Wired, agent: Agent, node_folder: Path) -> None:
    done = run_node(node_folder, SCRIPT, json.dumps(agent.keywords))
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["count"] == 600
    assert seen["gone"] == ["DELETE", 1, "Customer 150"]
    assert seen["named"] == [1, 1]
    assert seen["several"] == [{"a": 1}, {"b": 2}]
    assert seen["errors"] == [["SG002", True, None], ["42703", True, "8"]]
    assert seen["types"] == {"j": {"a": [1]}, "b": {"type": "Buffer", "data": [0, 255]}, "n": True}
    assert seen["pool"] == list(range(20))
    notes = wired_world.owner.execute(
        "SELECT note FROM orders WHERE id BETWEEN 90 AND 92 ORDER BY id"
    ).fetchall()
    assert notes == [("node",), ("again",), (None,)]
