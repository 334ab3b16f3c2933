-- How far projected tables are behind the record, and what holds them up. After the worker, whose state it tells of.

CREATE VIEW stint.freshness AS
WITH tables AS (
    SELECT c.relation, array_agg(DISTINCT c.name) AS projections, array_agg(DISTINCT t.type) AS types, min(c.freshness) AS freshness
    FROM stint.projection_config c CROSS JOIN LATERAL unnest(c.types) AS t (type)
    WHERE EXISTS (SELECT FROM pg_catalog.pg_class r WHERE r.oid = c.relation)
    GROUP BY c.relation
), measured AS (
    SELECT t.relation, t.projections, t.freshness, coalesce(w.behind, 0) AS behind,
           CASE WHEN w.behind > 0 THEN greatest(clock_timestamp() - w.oldest, '0') ELSE '0'::interval END AS lag,
           a.poisoned, a.first AS first_poisoned
    FROM tables t
    LEFT JOIN LATERAL (SELECT p.* FROM stint.projection_positions p WHERE p.relation = t.relation ORDER BY p.number DESC LIMIT 1) p ON true
    CROSS JOIN LATERAL (SELECT coalesce(p.epoch, 0) AS epoch, coalesce(p.base, '1:1:'::pg_snapshot) AS base OFFSET 0) b
    LEFT JOIN LATERAL (
        SELECT count(*) AS behind, min(e.recorded_at) AS oldest
        FROM (SELECT l.epoch, l.xid, l.seq, l.type, l.recorded_at FROM stint.event_log l WHERE l.epoch = b.epoch AND l.xid >= pg_snapshot_xmax(b.base)
              UNION ALL
              SELECT r.* FROM pg_snapshot_xip(b.base) x,
                   LATERAL (SELECT l.epoch, l.xid, l.seq, l.type, l.recorded_at FROM stint.event_log l WHERE l.epoch = b.epoch AND l.xid = x OFFSET 0) r
              UNION ALL
              SELECT l.epoch, l.xid, l.seq, l.type, l.recorded_at FROM stint.event_log l WHERE l.epoch > b.epoch) e
        WHERE e.type = ANY (t.types)
          AND NOT coalesce(e.seq <= p.seq AND (e.epoch < p.target_epoch OR e.epoch = p.target_epoch AND pg_visible_in_snapshot(e.xid, p.target)), false)
    ) w ON t.freshness > '0'
    CROSS JOIN LATERAL (SELECT count(*) AS poisoned, min(x.seq) AS first FROM stint.events_aside x WHERE x.relation = t.relation AND x.state = 'poisoned') a
)
SELECT m.relation, m.projections, m.freshness, m.lag, m.behind, m.poisoned, m.poisoned = 0 AND m.lag <= m.freshness AS ok,
       CASE WHEN m.poisoned > 0 THEN format('%s poisoned events, the first is number %s: see stint.poisoned_events', m.poisoned, m.first_poisoned)
            WHEN m.lag <= m.freshness THEN NULL
            WHEN NOT o.own THEN 'the database is a copy that was not activated'
            WHEN w.pid IS NULL THEN 'the maintenance worker does not run here'
            WHEN f.pid IS NOT NULL THEN format('process %s folds the table in a transaction that is still open', f.pid)
            WHEN cardinality(k.pids) > 0 THEN format('the maintenance worker waits for a lock of process %s', k.pids[1])
            WHEN w.last_error LIKE 'project: %' AND w.last_error_at >= coalesce(w.last_clean_round, '-infinity') THEN 'the worker''s last try failed: ' || w.last_error
            ELSE format('%s events wait for the maintenance worker', m.behind) END AS held_up_by
FROM measured m
CROSS JOIN LATERAL (SELECT coalesce((SELECT e.database = d.oid AND e.system_identifier = s.system_identifier
                                     FROM stint.meta e, pg_catalog.pg_database d, pg_control_system() s WHERE d.datname = current_database()), true) AS own) o
LEFT JOIN LATERAL (SELECT s.pid, s.last_error, s.last_error_at, s.last_clean_round
                   FROM stint.worker_state() s JOIN pg_catalog.pg_database d ON d.oid = s.database WHERE d.datname = current_database()) w ON true
LEFT JOIN LATERAL (SELECT l.pid FROM pg_catalog.pg_locks l
                   WHERE l.locktype = 'object' AND l.granted AND l.objsubid = 2 AND l.objid = m.relation::oid AND l.pid <> coalesce(w.pid, 0)
                     AND l.classid = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = 'stint')
                     AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
                   LIMIT 1) f ON true
CROSS JOIN LATERAL (SELECT CASE WHEN w.pid IS NOT NULL THEN pg_blocking_pids(w.pid) END AS pids) k;
COMMENT ON VIEW stint.freshness IS 'Each projected table: the lag it may have, the lag it has, and what holds it up';
COMMENT ON COLUMN stint.freshness.freshness IS 'how far the table may lag behind the record; zero: it changes in the transaction that records';
COMMENT ON COLUMN stint.freshness.lag IS 'age of the oldest event that is not folded yet';
COMMENT ON COLUMN stint.freshness.behind IS 'events that are not folded yet';
COMMENT ON COLUMN stint.freshness.poisoned IS 'events set aside because they do not fit the table';
COMMENT ON COLUMN stint.freshness.ok IS 'the lag is within the freshness and no event is set aside';
COMMENT ON COLUMN stint.freshness.held_up_by IS 'why it is not ok';
REVOKE ALL ON stint.freshness FROM PUBLIC;

CREATE FUNCTION stint.require_fresh(relation regclass) RETURNS interval
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'require_fresh_wrapper';
COMMENT ON FUNCTION stint.require_fresh(regclass) IS
'Returns the lag of a projected table, or fails where it is beyond its freshness or events are set aside: to be called before a decision that needs the state. Reads what is committed now.
Errors: 55000 with the lag and what holds the table up, 42704 the table has no projection. Takes no locks.';
REVOKE ALL ON FUNCTION stint.require_fresh(regclass) FROM PUBLIC;
