// Makes the schema (setup), or sends one of everything and records it.
import { PgBoss } from 'pg-boss';
import { connection, MARK, statement, withPayload, write } from './record.mjs';

const boss = new PgBoss({ ...connection, supervise: false, schedule: false });
boss.on('error', error => console.error(error.message));
await boss.start();
await boss.createQueue('bench');
if (process.argv[2] !== 'setup') {
  await boss.send('bench', MARK);
  write('enqueue.sql', [statement(/insert into/i, value => (String(value).includes(MARK) ? withPayload(value, ':payload') : undefined)) + ';']);
  await boss.insert('bench', Array.from({ length: 1000 }, () => ({ data: MARK })));
  let jobs;
  const insert = statement(/insert into/i, value => (String(value).includes(MARK) ? ((jobs = value), ':jobs') : undefined));
  write('enqueue_many.sql', [insert + ';']);
  await boss.insert('bench', Array.from({ length: 1000 }, () => ({ data: MARK, startAfter: '2099-01-01T00:00:00Z' })));
  let later;
  const schedule = statement(/insert into/i, value => (String(value).includes(MARK) ? ((later = value), ':later') : undefined));
  write('enqueue_scheduled.sql', [schedule + ';']);
  write('enqueue_many_init.sql', [`select ${withPayload(jobs, ':payload')} as jobs, ${withPayload(later, ':payload')} as later \\gset`]);
  for (const [name, size] of [['claim', 1], ['claim_batch', 100]]) {
    const fetched = await boss.fetch('bench', { batchSize: size });
    const claim = statement(/skip locked/i);
    await boss.complete('bench', fetched.map(job => job.id));
    const ids = size === 1 ? 'array[:id::uuid]' : ':id::uuid[]';
    write(`${name}.sql`, [claim + ' \\gset', statement(/completed/i, value => (Array.isArray(value) && value.includes(fetched[0].id) ? ids : undefined)) + ';']);
  }
}
await boss.stop({ graceful: false });
process.exit(0);
