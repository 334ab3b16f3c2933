// One scenario with BullMQ's own Queue and Worker; prints one JSON object for each sample.
import { Queue, Worker } from 'bullmq';
import Redis from 'ioredis';

const seconds = +process.env.BENCH_SECONDS;
const backlog = +process.env.BENCH_BACKLOG;
const connection = { path: process.env.REDIS_SOCKET, maxRetriesPerRequest: null };
const pad = 'x'.repeat(265);
const payload = () => ({ t: Date.now() / 1000, pad });
const many = () => Array.from({ length: 1000 }, () => ({ name: 'bench', data: payload() }));
const now = () => Number(process.hrtime.bigint()) / 1e3; // microseconds
const sleep = milliseconds => new Promise(done => setTimeout(done, milliseconds));
const redis = new Redis(connection);
const queue = new Queue('bench', { connection });

const percentile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] ?? 0;
const percentiles = latencies => {
  const sorted = Float64Array.from(latencies).sort();
  return { p50_us: percentile(sorted, 0.5), p99_us: percentile(sorted, 0.99) };
};

// What Redis wrote to its log, and the CPU it took.
const tally = async () => {
  const info = (await redis.info('persistence')) + (await redis.info('cpu'));
  const value = name => Number(new RegExp(`^${name}:([\\d.]+)`, 'm').exec(info)?.[1] ?? 0);
  return { log: value('aof_current_size'), cpu: value('used_cpu_sys') + value('used_cpu_user') };
};

const sample = async measure => {
  const before = await tally();
  const kept = await measure();
  const after = await tally();
  const tasks = Math.max(1, kept.tasks);
  kept.wal_bytes_per_task = (after.log - before.log) / tasks;
  kept.cpu_us_per_task = ((after.cpu - before.cpu) * 1e6) / tasks;
  console.log(JSON.stringify(kept));
};

const repeat = async (clients, call) => {
  const latencies = [], began = now(), end = began + seconds * 1e6;
  let tasks = 0;
  await Promise.all(Array.from({ length: clients }, async () => {
    while (now() < end) {
      const start = now();
      tasks += await call();
      latencies.push(now() - start);
    }
  }));
  return { tasks, rate: tasks / ((now() - began) / 1e6), ...percentiles(latencies) };
};

const consume = async (workers, concurrency) => {
  while ((await queue.getWaitingCount()) < backlog) await queue.addBulk(many());
  let done = 0;
  const running = Array.from({ length: workers }, () => new Worker('bench', async () => void done++, { connection, concurrency, autorun: false }));
  for (const worker of running) worker.on('error', error => console.error(error.message));
  await Promise.all(running.map(worker => worker.waitUntilReady()));
  for (const worker of running) worker.run();
  await sleep(300);
  await sample(async () => {
    const before = done, began = now();
    while (now() < began + seconds * 1e6 && (await queue.getWaitingCount()) > 200) await sleep(20);
    const tasks = done - before;
    return { tasks, rate: tasks / ((now() - began) / 1e6) };
  });
  await Promise.all(running.map(worker => worker.close()));
};

const scenarios = {
  enqueue: () => sample(() => repeat(8, async () => (await queue.add('bench', payload()), 1))),
  enqueue_many: () => sample(() => repeat(4, async () => (await queue.addBulk(many()), 1000))),
  // Eight connections with one job each; the script that finishes a job takes the next one, too.
  claim: () => consume(8, 1),
  batch: () => consume(4, 100),
  waiting: async () => {
    const latencies = [];
    const running = Array.from({ length: 8 }, () => new Worker('bench', async job => void latencies.push((Date.now() / 1000 - job.data.t) * 1e6), { connection }));
    await Promise.all(running.map(worker => worker.waitUntilReady()));
    await sleep(500);
    await sample(async () => {
      const began = now();
      for (let turn = 0; turn < 50 * 3 * seconds; turn++) {
        await sleep(Math.max(0, (began + turn * 20_000 - now()) / 1000));
        await queue.add('bench', payload());
      }
      await sleep(300);
      return { tasks: latencies.length, rate: latencies.length / ((now() - began) / 1e6), ...percentiles(latencies), point: { path: 'direct', what: 'latency', how: 'blocks in Redis' } };
    });
    await Promise.all(running.map(worker => worker.close()));
  },
};

await queue.waitUntilReady();
await scenarios[process.argv[2]]();
await queue.close();
redis.disconnect();
process.exit(0);
