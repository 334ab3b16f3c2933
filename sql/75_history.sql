-- Partitions of the history: which there are, and their upkeep (src/history). The tables they are of stand in 10_queue_tables.sql.

CREATE FUNCTION stint.history_partition(id uuid) RETURNS text
    LANGUAGE c IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
    AS 'MODULE_PATHNAME', 'history_partition_wrapper';
REVOKE ALL ON FUNCTION stint.history_partition FROM PUBLIC;
COMMENT ON FUNCTION stint.history_partition IS
'The name of the partition, in the schema stint, in which the facts of the task of that id are, or were before they were removed; its attempts and its outcome are in
task_attempts_… and task_outcomes_… of the same ending. Null for an id that no task has. Looks at the id only. Errors: 22004 no id.';

CREATE FUNCTION stint.create_history_partition(id uuid) RETURNS text
    LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
    AS 'MODULE_PATHNAME', 'create_history_partition_wrapper';
REVOKE ALL ON FUNCTION stint.create_history_partition FROM PUBLIC;
COMMENT ON FUNCTION stint.create_history_partition IS
'Makes the partitions that the task of that id belongs to, unless they are there, and returns the name of that of its facts. For loading rows from an archive; enqueue makes
what it needs by itself. Waits for another open transaction that makes partitions. Errors: 22004, 22023 no id of a task.';

CREATE FUNCTION stint.maintain_history() RETURNS TABLE (made int, dropped int, detached int, compacted int, held_up int, postponed int, more boolean)
    LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
    AS 'MODULE_PATHNAME', 'maintain_history_wrapper';
REVOKE ALL ON FUNCTION stint.maintain_history FROM PUBLIC;
COMMENT ON FUNCTION stint.maintain_history IS
'One round of what the maintenance worker does for the history: makes the partitions of now and of the next period for every retention that queues have, then removes the oldest
partition that is past its retention, one in each call: its locks are held until the transaction ends. Call it in transactions of its own until more is false.
made: periods for which partitions were made. dropped, detached: past their retention with every task in them. compacted: tasks that are live, or finished less than the retention ago, were kept and the rest removed.
held_up: more than a quarter of its tasks must be kept still. postponed: a lock was not to be had within stint.history_lock_timeout, a snapshot is open that does not see all its rows, or something
of yours depends on it (a WARNING says what); it is tried again. Does nothing in a copy that was not activated. Use in FROM.';

CREATE VIEW stint.history AS
SELECT h.class AS retention_class, h.retention, h.archive, p.partition, p.starts_at, p.starts_at + h.width AS ends_at, p.starts_at + h.width + h.retention AS expires_at, p.attached, p.bytes
FROM stint.history_classes h
JOIN (SELECT (m.part)[1]::smallint AS class, c.relname::text COLLATE "C" AS partition, c.relispartition AS attached,
             make_timestamptz((m.part)[2]::int, (m.part)[3]::int, (m.part)[4]::int, coalesce((m.part)[5], '0')::int, 0, 0, 'UTC') AS starts_at,
             pg_total_relation_size(c.oid) + coalesce(pg_total_relation_size(a.oid), 0) + coalesce(pg_total_relation_size(o.oid), 0) AS bytes
      FROM pg_class c
      CROSS JOIN LATERAL regexp_match(c.relname::text, '^task_facts_c([0-9]+)_([0-9]{4})([0-9]{2})([0-9]{2})([0-9]{2})?$') AS m (part)
      LEFT JOIN pg_class a ON a.relnamespace = c.relnamespace AND a.relname = replace(c.relname::text, 'task_facts', 'task_attempts')::name
      LEFT JOIN pg_class o ON o.relnamespace = c.relnamespace AND o.relname = replace(c.relname::text, 'task_facts', 'task_outcomes')::name
      WHERE c.relnamespace = 'stint'::regnamespace AND c.relkind = 'r' AND m.part IS NOT NULL) p ON p.class = h.class;
COMMENT ON VIEW stint.history IS
'Partitions of the history: the retention of their tasks, the time in which those were enqueued, and when all may go that finished by the end of it (null: never). bytes: facts,
attempts and outcomes together, with their indexes';
