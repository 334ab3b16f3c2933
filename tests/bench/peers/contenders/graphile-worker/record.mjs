// Sends one of everything and records it.
import { makeWorkerUtils, run } from 'graphile-worker';
import pg from 'pg';
import { connection, MARK, statement, withPayload, write } from './record.mjs';

const pgPool = new pg.Pool(connection);
const logger = { error: console.error, warn() {}, info() {}, debug() {}, scope: () => logger };
const utils = await makeWorkerUtils({ pgPool });
await utils.addJob('bench', MARK);
const payload = value => (value === JSON.stringify(MARK) ? ':payload' : undefined);
write('enqueue.sql', [statement(/add_job\b/, payload) + ';']);

// The list of the product's job_spec is an array of rows; only the payload in it changes.
const batch = async (name, spec) => {
  await utils.addJobs(Array.from({ length: 1000 }, () => ({ identifier: 'bench', payload: MARK, ...spec })));
  let jobs;
  const text = statement(/add_jobs\b/, value => (JSON.stringify(value)?.includes(MARK) ? ((jobs = value), ':' + name) : undefined));
  return [text, withPayload(typeof jobs === 'string' ? jobs : JSON.stringify(jobs), ':payload')];
};
const [many, jobs] = await batch('jobs', {});
write('enqueue_many.sql', [many + ';']);
const [scheduled, later] = await batch('later', { runAt: new Date('2099-01-01T00:00:00Z') });
write('enqueue_scheduled.sql', [scheduled + ';']);
write('enqueue_many_init.sql', [`select ${jobs} as jobs, ${later} as later \\gset`]);

// One at a time as the worker does by default, and in batches with the settings the product has for that.
for (const [name, worker] of [['claim', {}], ['claim_batch', { localQueue: { size: 100 }, completeJobBatchDelay: 20 }]]) {
  let ran = 0;
  const runner = await run({ pgPool, noHandleSignals: true, concurrency: name === 'claim' ? 1 : 100, preset: { worker }, taskList: { bench: () => void ran++ } });
  while (ran < 200) await new Promise(done => setTimeout(done, 20));
  await runner.stop();
  const claim = statement(name === 'claim' ? /limit 1\b.*for update[\s\S]*skip locked|for update[\s\S]*skip locked/i : /skip locked/i);
  const single = name === 'claim';
  const complete = statement(single ? /delete from[^;]*where id = \$1/i : /delete from[^;]*using unnest\(\$1/i, () => (single ? ':id' : ':id'));
  write(`${name}.sql`, [claim + ' \\gset', complete + ';']);
}
await utils.release();
process.exit(0);
