// Plays the steps of `day.py` with node-postgres: JSON in, what was seen of each step out.
const { Client } = require('pg');
const Cursor = require('pg-cursor');
const { to: copyTo, from: copyFrom } = require('pg-copy-streams');
const { Readable } = require('stream');
const { pipeline } = require('stream/promises');

const told = (r) => [r.command, r.rowCount, r.rows];
const patience = 400;

async function copied(client, text) {
  const pieces = [];
  for await (const piece of client.query(copyTo(text))) pieces.push(piece);
  return Buffer.concat(pieces).toString();
}

async function copiedIn(client, text, pieces, broken) {
  const stream = client.query(copyFrom(text));
  async function* data() {
    yield* pieces;
    if (broken) throw Object.assign(new Error('out of data'), { code: 'broken off' });
  }
  await pipeline(Readable.from(data()), stream);
  return stream.rowCount;
}

async function walked(client, text) {
  await client.query('BEGIN');
  const cursor = client.query(new Cursor(text, [], { rowMode: 'array' }));
  const pieces = [];
  for (let rows; (rows = await cursor.read(7)).length;) pieces.push(rows);
  await cursor.close();
  await client.query('COMMIT');
  return pieces;
}

async function cancelled(client, connect, text) {
  const running = client.query(text);
  setTimeout(() => {
    const other = connect();
    other.cancel(client, client._getActiveQuery ? client._getActiveQuery() : client.activeQuery);
  }, patience);
  return told(await running);
}

async function play(client, connect, { way, text, params }) {
  try {
    switch (way) {
      case 'plain': return told(await client.query({ text, rowMode: 'array' }));
      case 'params': return told(await client.query({ text, values: params, rowMode: 'array' }));
      case 'prepared': {
        const seen = [];
        for (let n = 0; n < 3; n++) seen.push(told(await client.query({ name: text.slice(0, 60), text, values: params, rowMode: 'array' })));
        return seen;
      }
      case 'many': {
        let count = 0;
        for (const values of params) count += (await client.query({ text, values })).rowCount;
        return count;
      }
      case 'cursor': return await walked(client, text);
      case 'copy out': return await copied(client, text);
      case 'copy in': return await copiedIn(client, text, params, false);
      case 'copy broken': return await copiedIn(client, text, params, true);
      case 'copy rows': return await copiedIn(client, text, params.map((row) => row.join('\t') + '\n'), false);
      case 'cancel': return await cancelled(client, connect, text);
    }
  } catch (e) {
    return [e.code, e.position ?? null, e.constraint ?? null, e.where ?? null];
  }
}

async function main() {
  let input = '';
  for await (const piece of process.stdin) input += piece;
  const { dsn, secure, steps } = JSON.parse(input);
  const connect = () => new Client({ connectionString: dsn, ssl: secure ? { rejectUnauthorized: false } : false });
  const client = connect();
  await client.connect();
  const seen = [];
  for (const step of steps) seen.push(await play(client, connect, step));
  await client.end();
  console.log(JSON.stringify(seen));
}
main().catch((e) => { console.error(e); process.exit(1); });
