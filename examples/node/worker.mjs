#!/usr/bin/env node
// A worker for Node, with pg:   node worker.mjs QUEUE [--name NAME] [--lease SECONDS] [--ahead N]
//
// The connection comes from PGHOST and friends; put your own work into `work`. Everything else is SQL: run as many of these processes as should work at a time.
//
// * It waits in the server: `claim(wait => …)` answers as soon as there is a task. The connection is busy meanwhile, so do not take it from a small pool.
// * A second connection keeps the leases while the work runs, and learns there of cancellations and of leases that are lost.
// * --ahead N claims up to N tasks more than it can begin, so that the next one is at hand. A claimed task holds its budgets, begun or not; so nothing is claimed
//   ahead from a queue that draws on budgets. There the claim that waits in the server is all the prefetching there is: it holds nothing until it is answered.
//   Do not use --ahead where tasks name budgets themselves.
// * An answer that was lost with the connection is asked for again: complete and fail may be repeated, count once, and say whether this call was the one.
// * SIGTERM: the task in hand is finished and reported, those not begun are released, which does not count as an attempt.

import os from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";
import pg from "pg";

const CLAIM = "SELECT id, lease, attempt, payload FROM stint.claim($1, $2, max => $3, lease_for => $4, wait => '20 s')";
const EXTEND = "SELECT status FROM stint.extend($1, $2, $3)";
const COMPLETE = `
  SELECT outcome, first FROM stint.complete($1, $2, $3, result => $4::jsonb, run_id => $5,
    model => $6, input_tokens => $7, output_tokens => $8, model_cost => $9)`;
const FAIL = "SELECT outcome, first FROM stint.fail($1, $2, $3, $4)";
const RELEASE = "SELECT outcome, first FROM stint.release($1, $2, $3)";
const HAS_BUDGETS = "SELECT budgets <> '{}' AS yes FROM stint.queues WHERE queue = $1";

/** Your work: returns the result and what it used. `stop.aborted` says that the task was cancelled or its lease is lost. */
async function work(payload, stop) {
  for (let n = 0; n < (payload.seconds ?? 0) * 10; n++) {
    if (stop.aborted) throw new Error("stopped");
    await sleep(100);
  }
  if (payload.error) throw new Error(payload.error);
  return { result: { echo: payload }, usage: { model: "example-1", inputTokens: 100, outputTokens: 20, modelCost: "0.0012" } };
}

/** How long to wait after the nth failure in a row: longer each time, up to half a minute, and never the same as the other workers. */
async function patience(failures, error) {
  const ms = Math.min(30_000, 200 * 2 ** failures) * (0.5 + Math.random() / 2);
  console.error(`${error.message}: again in ${Math.round(ms)} ms`);
  await sleep(ms);
}

/** Whether the server, not the call, was the trouble: no connection (no SQLSTATE), a shutdown, a cancelled statement, too many connections. */
const passes = (error) => !/^[0-9A-Z]{5}$/.test(error.code ?? "") || /^(08|53|57|58)/.test(error.code);

/** One connection, made again when it is lost. */
class Database {
  constructor(name) {
    this.name = name;
  }

  async ask(query, ...values) {
    this.connection ??= this.connect();
    return (await (await this.connection).query(query, values)).rows;
  }

  async connect() {
    const client = new pg.Client({ application_name: this.name, connectionTimeoutMillis: 10_000 });
    const lost = () => {
      if (this.client === client) this.client = this.connection = undefined;
    };
    client.on("error", lost).on("end", lost);
    this.client = client;
    try {
      await client.connect();
      return client;
    } catch (error) {
      lost();
      throw new Error(`no connection: ${error.message}`);
    }
  }

  /** Asks until there is an answer. Only for what may be asked twice. */
  async insist(query, ...values) {
    for (let failures = 1; ; failures++) {
      try {
        return (await this.ask(query, ...values))[0];
      } catch (error) {
        if (!passes(error)) throw error;
        await patience(failures, error);
      }
    }
  }

  async end() {
    await this.client?.end();
  }
}

class Worker {
  held = new Map(); // by lease: the task's id, and what tells its work that it is ours no more
  stopping = false;
  waiting = false;

  constructor({ queue, name, lease, ahead }) {
    Object.assign(this, { queue, name, lease, ahead, db: new Database(name), heart: new Database(`${name} heartbeat`) });
  }

  async run() {
    const beat = setInterval(() => this.heartbeat(), (this.lease * 1000) / 3);
    const waitingHere = [];
    for (let failures = 0; !this.stopping; ) {
      try {
        waitingHere.push(...(await this.claim()));
        failures = 0;
      } catch (error) {
        // If the server had granted a lease, it lapses: nobody knows it.
        if (!passes(error)) throw error;
        if (!this.stopping) await patience(++failures, error);
      }
      while (waitingHere.length && !this.stopping) await this.perform(waitingHere.shift());
    }
    for (const task of waitingHere) await this.report(RELEASE, task);
    clearInterval(beat);
    await Promise.all([this.db.end(), this.heart.end()]);
  }

  async claim() {
    const budgeted = this.ahead && (await this.db.ask(HAS_BUDGETS, this.queue))[0]?.yes !== false;
    if (this.stopping) return [];
    this.waiting = true;
    try {
      const tasks = await this.db.ask(CLAIM, this.queue, this.name, budgeted ? 1 : 1 + this.ahead, `${this.lease} s`);
      for (const task of tasks) this.held.set(task.lease, { id: task.id, gone: new AbortController() });
      return tasks;
    } finally {
      this.waiting = false;
    }
  }

  async perform(task) {
    const stop = this.held.get(task.lease).gone.signal;
    if (stop.aborted) return this.report(RELEASE, task); // lost or cancelled before it was begun
    let done;
    try {
      done = await work(task.payload, stop);
    } catch (error) {
      return this.report(FAIL, task, String(error)); // whatever the work did, the worker goes on
    }
    const { result, usage } = done;
    const runId = `${this.name}/${task.id}.${task.attempt}`;
    try {
      await this.report(COMPLETE, task, JSON.stringify(result), runId, usage.model, usage.inputTokens, usage.outputTokens, usage.modelCost);
    } catch (error) {
      await this.report(FAIL, task, `result refused: ${error.message}`); // too large, say
    }
  }

  async report(query, task, ...values) {
    const answer = await this.db.insist(query, this.queue, task.id, task.lease, ...values);
    this.held.delete(task.lease);
    console.log(JSON.stringify({ id: task.id, attempt: task.attempt, ...answer }));
  }

  async heartbeat() {
    for (const [lease, { id, gone }] of [...this.held]) {
      try {
        const [{ status }] = await this.heart.ask(EXTEND, this.queue, id, lease);
        if (status !== "held") gone.abort();
      } catch (error) {
        console.error(`heartbeat: ${error.message}`); // the next beat tries again; the lease has two thirds of its time left
        return;
      }
    }
  }

  async stop() {
    this.stopping = true;
    // More than once: the first may come before the statement that it is to cancel.
    for (; this.waiting; await sleep(200)) {
      const pid = this.db.client?.processID;
      if (pid) await this.heart.ask("SELECT pg_cancel_backend($1)", pid).catch((error) => console.error(error.message));
    }
  }
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { name: { type: "string" }, lease: { type: "string" }, ahead: { type: "string" } },
});
if (positionals.length !== 1) {
  console.error("usage: node worker.mjs QUEUE [--name NAME] [--lease SECONDS] [--ahead N]");
  process.exit(2);
}
const worker = new Worker({
  queue: positionals[0],
  name: values.name ?? `${os.hostname()}:${process.pid}`,
  lease: Number(values.lease ?? 60),
  ahead: Number(values.ahead ?? 0),
});
process.on("SIGTERM", () => worker.stop());
process.on("SIGINT", () => worker.stop());
await worker.run();
