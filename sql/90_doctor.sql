-- What is off with this server for pg_stint, and what to do about it. Plain SQL, so that it answers also where the library was not preloaded.
CREATE FUNCTION stint.doctor() RETURNS TABLE ("check" text, ok boolean, detail text, hint text)
    LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
WITH
launcher AS MATERIALIZED (SELECT * FROM stint.launcher_state()),
workers AS MATERIALIZED (SELECT * FROM stint.worker_state()),
worker AS (SELECT w.* FROM workers w JOIN pg_database d ON d.oid = w.database WHERE d.datname = current_database()),
settings AS MATERIALIZED (SELECT name, setting, pending_restart FROM pg_settings),
activity AS MATERIALIZED (SELECT * FROM pg_stat_activity),
server AS (
    SELECT pg_is_in_recovery() AS standby,
           clock_timestamp() AS now,
           greatest(interval '10 s', 20 * interval '1 ms' * coalesce((SELECT setting::int FROM settings WHERE name = 'stint.naptime'), 500)) AS patience
),
violations AS (SELECT count(*) AS number, min(c.rule) AS rule FROM stint.check() c WHERE c.rule <> 'every change of a state table is captured'),
old_transactions AS (
    SELECT format('pid %s, %s in %s, %s for %s', a.pid, a.usename, a.datname, a.state, date_trunc('second', s.now - a.xact_start)) AS who, a.xact_start
      FROM activity a, server s
     WHERE a.xact_start < s.now - interval '5 min' AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.pid <> pg_backend_pid()
),
findings (number, "check", ok, detail, remedy, advice) AS (
    SELECT 10, 'library is preloaded', l.preloaded, format('shared_preload_libraries = %L', current_setting('shared_preload_libraries')),
           format('Add this line to postgresql.conf and restart the server: shared_preload_libraries = %L',
                  concat_ws(',', nullif(current_setting('shared_preload_libraries'), ''), 'pg_stint')), NULL
      FROM launcher l
    UNION ALL
    SELECT 20, 'library and extension have one version', e.extversion = stint.library_version(),
           format('library %s, extension %s', stint.library_version(), e.extversion),
           'Restart the server if it still runs an older library; then run ALTER EXTENSION pg_stint UPDATE.', NULL
      FROM pg_extension e WHERE e.extname = 'pg_stint'
    UNION ALL
    SELECT 30, 'settings are in force', count(s.name) = 0,
           coalesce('changed and waiting for a restart: ' || string_agg(s.name, ', ' ORDER BY s.name), 'none waits for a restart'),
           'Restart the server.', NULL
      FROM settings s
     WHERE s.pending_restart AND (s.name LIKE 'stint.%' OR s.name IN ('shared_preload_libraries', 'max_worker_processes'))
    UNION ALL
    SELECT 40, 'server takes writes', NOT s.standby AND current_setting('default_transaction_read_only') = 'off',
           CASE WHEN s.standby THEN 'standby' ELSE format('primary, default_transaction_read_only = %s', current_setting('default_transaction_read_only')) END,
           CASE WHEN s.standby THEN 'Views can be read here; call the verbs on the primary.'
                ELSE 'Turn default_transaction_read_only off for the roles that call the verbs.' END, NULL
      FROM server s
    UNION ALL
    SELECT 50, 'launcher runs', l.pid IS NOT NULL OR s.standby,
           CASE WHEN l.pid IS NOT NULL THEN format('pid %s', l.pid) WHEN s.standby THEN 'it starts after promotion' ELSE 'it does not run' END,
           CASE WHEN l.preloaded THEN 'It is started again within a second; if it is not, the server''s log says why.' ELSE 'Preload the library.' END, NULL
      FROM launcher l, server s
    UNION ALL
    SELECT 60, 'maintenance worker runs here', w.pid IS NOT NULL OR s.standby,
           CASE WHEN w.pid IS NOT NULL THEN format('pid %s, since %s', w.pid, w.started_at::timestamptz(0))
                WHEN s.standby THEN 'it starts after promotion'
                WHEN w.database IS NOT NULL THEN 'it is being started'
                WHEN d.datistemplate THEN 'a template database has none'
                ELSE 'it does not run' END,
           CASE WHEN NOT l.preloaded THEN 'Preload the library.'
                WHEN l.refused_at IS NOT NULL THEN 'PostgreSQL has no room for another background worker: raise max_worker_processes and restart the server.'
                WHEN d.datistemplate THEN 'Run ALTER DATABASE … IS_TEMPLATE false, or call stint.sweep() and stint.promote() yourself.'
                WHEN w.database IS NULL AND (SELECT count(*) FROM workers) >= (SELECT setting::int FROM settings WHERE name = 'stint.max_databases')
                THEN 'Raise stint.max_databases and restart the server.'
                ELSE 'Look again in a minute; if it still does not run, the server''s log says why. Until then call stint.sweep() and stint.promote().' END, NULL
      FROM launcher l CROSS JOIN server s JOIN pg_database d ON d.datname = current_database() LEFT JOIN worker w ON true
    UNION ALL
    SELECT 70, 'maintenance worker keeps its rounds', coalesce(w.last_round, w.started_at) > s.now - s.patience,
           format('last round %s%s', coalesce('at ' || w.last_round::timestamptz(0), 'not yet'),
                  CASE WHEN a.state = 'active' THEN format(', now at the step "%s"', a.query) END),
           'A step takes long or waits for a lock: look for the worker''s pid in pg_stat_activity and pg_locks.', NULL
      FROM worker w CROSS JOIN server s LEFT JOIN activity a ON a.pid = w.pid
     WHERE w.pid IS NOT NULL
    UNION ALL
    SELECT 80, 'maintenance steps succeed', w.last_error_at IS NULL OR coalesce(w.last_clean_round > w.last_error_at, false),
           CASE WHEN w.last_error_at IS NULL THEN 'no step has failed since the server started'
                ELSE format('%s, at %s', w.last_error, w.last_error_at::timestamptz(0)) END,
           'The step is tried again in every round; the server''s log shows the error in full.', NULL
      FROM worker w
    UNION ALL
    SELECT 90, 'room for background workers', u.used < u.room AND l.refused_at IS NULL, format('%s of max_worker_processes = %s in use', u.used, u.room),
           'Raise max_worker_processes and restart the server: each database with the extension needs one, the launcher one, parallel queries some.', NULL
      FROM launcher l, (
            SELECT count(*) AS used, current_setting('max_worker_processes')::int AS room
              FROM activity
             WHERE backend_type NOT IN ('archiver', 'autovacuum launcher', 'autovacuum worker', 'background writer', 'checkpointer', 'client backend', 'io worker',
                                        'slotsync worker', 'standalone backend', 'startup', 'walreceiver', 'walsender', 'walsummarizer', 'walwriter')) u
    UNION ALL
    SELECT 100, 'room for databases', count(w.database) < s.setting::int, format('%s of stint.max_databases = %s in use', count(w.database), s.setting),
           'Raise stint.max_databases and restart the server before the next database gets the extension.', NULL
      FROM settings s LEFT JOIN workers w ON true WHERE s.name = 'stint.max_databases' GROUP BY s.setting
    UNION ALL
    SELECT 110, 'room for budgets', b.used < s.setting::int, format('%s of stint.max_budgets = %s in this database', b.used, s.setting),
           'Raise stint.max_budgets, which all databases share, and restart the server.', NULL
      FROM settings s, (SELECT count(*) AS used FROM stint.budget_config) b WHERE s.name = 'stint.max_budgets'
    UNION ALL
    SELECT 115, 'the database is no copy', bool_and(c.own) IS NOT FALSE,
           CASE WHEN bool_and(c.own) IS NOT FALSE THEN 'its tasks and state were made here' ELSE 'its tasks and state are another database''s: verbs are refused and the maintenance worker rests' END,
           'SELECT stint.activate() if it is to be worked in.', NULL
      FROM (SELECT m.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                   AND m.system_identifier = (SELECT s.system_identifier FROM pg_control_system() s) AS own FROM stint.meta m) c
    UNION ALL
    SELECT 120, 'storage rules hold', v.number = 0, CASE WHEN v.number = 0 THEN 'stint.check() finds nothing' ELSE format('%s violations, such as: %s', v.number, v.rule) END,
           'SELECT * FROM stint.check() names the rows; please report it. A budget that appears once and not again was only in the middle of a claim.', NULL
      FROM violations v
    UNION ALL
    SELECT 122, 'changes of state tables are captured', count(*) = 0, coalesce(string_agg(u.detail, '; ' ORDER BY u.detail), 'every state table and partition has its triggers'),
           'Changes that were missed cannot be told any more. Enable the triggers (ALTER TABLE … ENABLE TRIGGER …); where they are missing, or something else writes past them, mend that and declare the table anew with stint.drop_state and stint.create_state.',
           NULL
      FROM stint.uncaptured() u
    UNION ALL
    SELECT 123, 'history partitions are made ahead', count(*) FILTER (WHERE h.latest IS NULL OR h.latest <= s.now) = 0,
           coalesce('not there yet for ' || string_agg(format('class %s (retention %s)', c.class, coalesce(c.retention::text, 'for ever')), ', ') FILTER (WHERE h.latest IS NULL OR h.latest <= s.now),
                    'each retention in use has one for the time to come'),
           'The maintenance worker makes them; an enqueue that finds none makes it itself, which takes some milliseconds. SELECT * FROM stint.maintain_history() makes them now.', NULL
      FROM server s
     CROSS JOIN stint.history_classes c
      LEFT JOIN (SELECT p.retention_class, max(p.starts_at) AS latest FROM stint.history p WHERE p.attached GROUP BY 1) h ON h.retention_class = c.class
     WHERE NOT s.standby AND EXISTS (SELECT FROM stint.queue_config q WHERE q.history_class = c.class AND q.created_at < s.now - s.patience)
    UNION ALL
    SELECT 125, 'history retention keeps up', count(*) = 0,
           CASE WHEN count(*) = 0 THEN 'no partition is long past its retention'
                ELSE format('%s past it for more than a quarter of it; the oldest: stint.%s, which expired at %s', count(*),
                            (array_agg(p.partition ORDER BY p.expires_at))[1], min(p.expires_at)::timestamptz(0)) END,
           'Either many of its tasks are live still or finished late (SELECT status, count(*) FROM stint.tasks WHERE stint.history_partition(id) = …), or something stands in the way: SELECT * FROM stint.maintain_history() says which.',
           NULL
      FROM stint.history p, server s
     WHERE p.expires_at + p.retention / 4 < s.now
    UNION ALL
    SELECT 128, 'consumers have all they need', count(*) FILTER (WHERE c.must_refetch) = 0,
           coalesce('changes that they have not read are gone: ' || string_agg(format('%L', c.consumer), ', ' ORDER BY c.consumer) FILTER (WHERE c.must_refetch),
                    format('none of %s is behind what is kept', count(*))),
           'Drop them, and create those that are still wanted again with start => ''snapshot'', as docs/changelog.md shows.', NULL
      FROM stint.consumers c
    UNION ALL
    SELECT 127, 'projected tables are fresh', count(*) FILTER (WHERE NOT f.ok) = 0,
           coalesce(string_agg(format('%s lags %s behind the record, held up by: %s', f.relation, f.lag, f.held_up_by), '; ') FILTER (WHERE NOT f.ok),
                    format('%s projected tables, each within its freshness', count(*))),
           'SELECT * FROM stint.freshness shows each; stint.poisoned_events shows what was set aside, stint.rebuild(…) tries it again and stint.skip_event(…) gives it up.', NULL
      FROM stint.freshness f
    UNION ALL
    SELECT 126, 'changes go when they are past their history', count(*) = 0,
           coalesce('kept for more than a quarter beyond it: ' || string_agg(c.relation::text, ', ' ORDER BY c.relation::text), 'none is kept much longer than its table''s history says'),
           'A tick goes when all tables that changed in it are past their history: SELECT relation, history FROM stint.captures shows which keeps longest; stint.set_history changes it. SELECT * FROM stint.expire_changes() lets go now.',
           NULL
      FROM stint.captures c, server s
     WHERE EXISTS (SELECT FROM stint.ticks t WHERE t.at < s.now - c.history * 1.25 - s.patience AND NOT t.expired AND c.relation = ANY (t.relations))
    UNION ALL
    SELECT 129, 'watches can make their tasks', count(p.problem) = 0,
           coalesce(string_agg(format('%I: %s', p.watch, p.problem), '; ' ORDER BY p.watch), 'each has its table and its queue, and its last task was made'),
           'Make the queue or raise the limit it names, or drop the watch and declare it anew; stint.watch_history shows what was missed.', NULL
      FROM (SELECT w.watch,
                   CASE WHEN NOT EXISTS (SELECT FROM pg_class t WHERE t.oid = w.relation) THEN 'its table is gone'
                        WHEN NOT EXISTS (SELECT FROM stint.queue_config q WHERE q.queue = w.into_queue) THEN format('queue %I is gone', w.into_queue)
                        WHEN l.error IS NOT NULL THEN format('%s, at %s', l.error, l.fired_at::timestamptz(0)) END AS problem
              FROM stint.watch_config w
              LEFT JOIN LATERAL (SELECT g.error, g.fired_at FROM stint.watch_log g WHERE g.watch = w.watch ORDER BY g.seq DESC LIMIT 1) l ON true) p
     WHERE p.problem IS NOT NULL
    UNION ALL
    SELECT 130, 'autovacuum is on', current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean,
           format('autovacuum = %s, track_counts = %s', current_setting('autovacuum'), current_setting('track_counts')),
           'Turn both on: queue tables turn over fast, and without vacuum they only grow.', NULL
    UNION ALL
    SELECT 140, 'no transaction is old', count(*) = 0, CASE WHEN count(*) = 0 THEN 'none is older than five minutes'
                ELSE format('%s older than five minutes; the oldest: %s', count(*), (array_agg(o.who ORDER BY o.xact_start))[1]) END,
           'End it (pg_terminate_backend) or wait: vacuum removes nothing that it may still see, so queue tables grow.', NULL
      FROM old_transactions o
    UNION ALL
    SELECT 150, 'no prepared transaction is old', count(*) = 0,
           coalesce('prepared more than five minutes ago: ' || string_agg(format('%L in %s', p.gid, p.database), ', ' ORDER BY p.prepared), 'none is older than five minutes'),
           'COMMIT PREPARED or ROLLBACK PREPARED it: until then vacuum removes nothing that it may still see.', NULL
      FROM server s JOIN pg_prepared_xacts p ON p.prepared < s.now - interval '5 min'
    UNION ALL
    SELECT 160, 'replication slots are in use', count(*) = 0, coalesce('idle: ' || string_agg(r.slot_name, ', ' ORDER BY r.slot_name), 'no slot is idle'),
           'Drop those that nobody comes back for (pg_drop_replication_slot): they keep WAL, and may keep dead rows.', NULL
      FROM pg_replication_slots r WHERE NOT r.active
    UNION ALL
    SELECT 170, 'commits survive a crash', current_setting('fsync')::boolean AND current_setting('full_page_writes')::boolean,
           format('fsync = %s, full_page_writes = %s, synchronous_commit = %s',
                  current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit')),
           'Turn fsync and full_page_writes on, except where all data may be lost.',
           CASE WHEN current_setting('synchronous_commit') = 'off'
                THEN 'With synchronous_commit off, a crash of the server takes back what was acknowledged just before it.' END
    UNION ALL
    SELECT 180, 'transactions are READ COMMITTED', current_setting('default_transaction_isolation') = 'read committed',
           format('default_transaction_isolation = %s', current_setting('default_transaction_isolation')),
           'Leave it at read committed for the roles that call the verbs: at the other levels a claim cannot wait, and calls may fail with 40001.', NULL
    UNION ALL
    SELECT 190, 'idle transactions are ended', true, format('idle_in_transaction_session_timeout = %s', current_setting('idle_in_transaction_session_timeout')), NULL,
           CASE WHEN current_setting('idle_in_transaction_session_timeout') = '0'
                THEN 'Set idle_in_transaction_session_timeout: a client that hangs in a transaction keeps its locks, and keeps vacuum from its work.' END
)
SELECT f."check", coalesce(f.ok, false), f.detail, CASE WHEN f.ok THEN f.advice ELSE f.remedy END FROM findings f ORDER BY f.number
$$;
COMMENT ON FUNCTION stint.doctor() IS
'Examines this server and database for what pg_stint needs: one row for each check. ok: whether it is as it should be; detail: what was seen; hint: what to do where it is not, or an advice. Changes nothing, and works on a standby and where the library was not preloaded, too. It runs stint.check(), which reads whole tables. What is off: SELECT * FROM stint.doctor() WHERE NOT ok.';
REVOKE ALL ON FUNCTION stint.doctor() FROM PUBLIC;
