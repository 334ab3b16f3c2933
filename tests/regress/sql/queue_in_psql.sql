-- The life of tasks as psql shows it. Ids and leases differ at every run and are not printed.
SELECT stint.create_budget('model', max_running => 2, max_tokens => 100);
SELECT stint.create_queue('q', budgets => '{model}', max_attempts => 2, backoff_base => '10 s', backoff_jitter => 0);

SELECT count(*) FROM stint.enqueue_many('q', '[{"payload": "small", "tokens": 10, "agent": "reader"}, {"payload": "big", "tokens": 95}, {"payload": "urgent", "tokens": 10, "priority": 9}, {"payload": "later", "tokens": 10, "delay": "1 day"}]');
SELECT status, why, priority, agent, tokens, attempt FROM stint.tasks WHERE queue = 'q' ORDER BY id;
SELECT queue, scheduled, ready, running, completed, failed, cancelled FROM stint.queue_stats WHERE queue = 'q';
SELECT payload, priority, attempt, agent, tokens, expires_in_ms FROM stint.claim('q', 'w1', max => 5);
SELECT budget, max_running, running, room_running, max_tokens, tokens_in_flight, room_tokens FROM stint.budgets WHERE budget = 'model';
SELECT p.payload, stint.explain('q', t.id) FROM stint.tasks t JOIN stint.task_payloads p USING (queue, id) WHERE t.status = 'ready';

-- A superuser may look where no view shows it: the leases.
SELECT id AS small, lease AS small_lease FROM stint.place_running r JOIN stint.task_payloads p USING (queue, id) WHERE p.payload = '"small"' \gset
SELECT id AS urgent, lease AS urgent_lease FROM stint.place_running r JOIN stint.task_payloads p USING (queue, id) WHERE p.payload = '"urgent"' \gset
SELECT status, expires_in_ms FROM stint.extend('q', :'small', :'small_lease', duration => '90 s');
SELECT * FROM stint.complete('q', :'small', :'small_lease', result => '{"n": 1.10}', model => 'm1', input_tokens => 8, output_tokens => 2, model_cost => 0.00010);
SELECT * FROM stint.complete('q', :'small', :'small_lease');
SELECT outcome, first, status, retry_in_ms FROM stint.fail('q', :'urgent', :'urgent_lease', 'overloaded', input_tokens => 3);
SELECT outcome, first, status FROM stint.fail('q', :'urgent', :'urgent_lease', 'overloaded');
SELECT outcome, first, status FROM stint.complete('q', :'urgent', gen_random_uuid());
SELECT status FROM stint.extend('q', :'urgent', :'urgent_lease');
SELECT * FROM stint.cancel('q', :'urgent', 'no longer needed');
SELECT * FROM stint.cancel('q', :'urgent');
SELECT ended, attempt, worker, agent, error, model, predicted_tokens, input_tokens, output_tokens, model_cost FROM stint.attempts WHERE queue = 'q' ORDER BY id;
SELECT payload, result FROM stint.task_payloads WHERE queue = 'q' AND result IS NOT NULL;
SELECT status, why FROM stint.tasks WHERE queue = 'q' ORDER BY id;
SELECT * FROM stint.check();
