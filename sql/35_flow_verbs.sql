-- What a task keeps between attempts, and waiting for events. Functions of the library (src/queue/checkpoint.rs, event.rs).

CREATE FUNCTION stint.checkpoint(
    queue text,
    id uuid,
    lease uuid,
    step text,
    value jsonb
) RETURNS TABLE (status text, value jsonb)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'checkpoint_wrapper';
REVOKE ALL ON FUNCTION stint.checkpoint(text, uuid, uuid, text, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION stint.checkpoint(text, uuid, uuid, text, jsonb) IS
'Keeps what a step of the task came to, so that a later attempt need not pay for it again. The first value of a step stays, as jsonb keeps it.
status: ''saved''; ''kept'' (the step had a value: use the one returned); ''lost'' (the lease is not the live one: stop, nothing was written).
Use in FROM. Errors: P0002 unknown task; 42704 unknown queue; 54000 the value is over stint.max_payload.';

CREATE FUNCTION stint.checkpoints(
    queue text,
    id uuid
) RETURNS TABLE (step text, value jsonb, attempt int, saved_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'checkpoints_wrapper';
REVOKE ALL ON FUNCTION stint.checkpoints(text, uuid) FROM PUBLIC;
COMMENT ON FUNCTION stint.checkpoints(text, uuid) IS
'The steps a task has finished, in that order, with the attempt that did. An event it awaited is a step of that name; its value is null where the wait timed out.
Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.await(
    queue text,
    id uuid,
    lease uuid,
    event text,
    timeout interval DEFAULT NULL
) RETURNS TABLE (status text, payload jsonb)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'await_event_wrapper';
REVOKE ALL ON FUNCTION stint.await(text, uuid, uuid, text, interval) FROM PUBLIC;
COMMENT ON FUNCTION stint.await(text, uuid, uuid, text, interval) IS
'Waits for an event without holding anything: unless the event was emitted already, the attempt ends without counting, its lease and budgets are given up, and the
task is claimable again when the event is emitted or the timeout (by default stint.max_delay) is over. The next attempt calls await again and gets the answer.
status: ''emitted'', with the payload; ''waiting'' (stop: the lease is given up); ''timed_out''; ''cancelled'' where that had been asked; ''lost'' (the lease is not the
live one: stop). The answer is kept as a checkpoint under the event''s name, so every later attempt gets the same.
Waits for: another transaction that emits the event. Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.emit(
    event text,
    payload jsonb DEFAULT 'null'
) RETURNS TABLE (first boolean, woken int, payload jsonb)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'emit_wrapper';
REVOKE ALL ON FUNCTION stint.emit(text, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION stint.emit(text, jsonb) IS
'Emits an event, which happens once: the first committed payload of a name stays, for those who await it now (woken says how many) and for those who will.
first: whether this call was the one; payload: the one that stays. Tasks are woken when the transaction commits; a rollback wakes nobody.
Waits for: another transaction that emits the same event or is about to await it. Use in FROM. Errors: 54000 the payload is over stint.max_payload.';
