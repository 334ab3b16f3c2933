-- What the maintenance worker tells of itself. It keeps this in shared memory, so telling writes nothing.
CREATE FUNCTION stint.launcher_state()
    RETURNS TABLE (preloaded boolean, pid int, refused_at timestamptz)
    LANGUAGE c VOLATILE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
    AS 'MODULE_PATHNAME', 'launcher_state_wrapper';
COMMENT ON FUNCTION stint.launcher_state() IS
$$One row: whether the library was loaded when the server started, the launcher's process (null: it does not run, as on a standby), and since when PostgreSQL
has had no room for another maintenance worker (null: it has). Read by stint.doctor().$$;
REVOKE ALL ON FUNCTION stint.launcher_state() FROM PUBLIC;

CREATE FUNCTION stint.worker_state()
    RETURNS TABLE (database oid, pid int, started_at timestamptz, last_round timestamptz, last_clean_round timestamptz, last_error text, last_error_at timestamptz)
    LANGUAGE c VOLATILE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
    AS 'MODULE_PATHNAME', 'worker_state_wrapper';
COMMENT ON FUNCTION stint.worker_state() IS
$$One row for each database of the server that has a maintenance worker (pid is null while it is being started). Empty where the library was not loaded when
the server started. Read by stint.maintenance, which names the databases.$$;
REVOKE ALL ON FUNCTION stint.worker_state() FROM PUBLIC;

CREATE VIEW stint.maintenance AS
SELECT d.datname AS database, w.pid, w.started_at, w.last_round, w.last_clean_round, w.last_error, w.last_error_at
  FROM stint.worker_state() w
  JOIN pg_catalog.pg_database d ON d.oid OPERATOR(pg_catalog.=) w.database;
COMMENT ON VIEW stint.maintenance IS 'The maintenance workers of this server, one for each database with the extension, and the last error each has met';
COMMENT ON COLUMN stint.maintenance.pid IS 'The process; null while it is being started';
COMMENT ON COLUMN stint.maintenance.last_round IS 'When it last ran all steps; at most stint.naptime ago, unless a step is at work';
COMMENT ON COLUMN stint.maintenance.last_clean_round IS 'When it last ran all steps and none failed';
COMMENT ON COLUMN stint.maintenance.last_error IS 'The step that last failed and its error, since the server started';
