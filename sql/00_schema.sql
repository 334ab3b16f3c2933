-- Names and errors are text that the library reads as UTF-8; in another encoding the first accented letter would fail, in the middle of a day's work.
DO $$
BEGIN
    IF pg_catalog.current_setting('server_encoding') OPERATOR(pg_catalog.<>) 'UTF8' THEN
        RAISE EXCEPTION 'pg_stint needs a database in UTF8, this one is in %', pg_catalog.current_setting('server_encoding')
            USING ERRCODE = 'feature_not_supported', HINT = 'Create the database with ENCODING ''UTF8'' TEMPLATE template0.';
    END IF;
END
$$;

-- The schema, made plainly: a schema of that name that somebody else made beforehand must stop the installation, not be adopted.
CREATE SCHEMA stint;
COMMENT ON SCHEMA stint IS 'pg_stint: the queue and the state of agent work';
