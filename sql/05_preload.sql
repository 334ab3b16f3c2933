-- Before anything else is made: the library must have been loaded when the server started. The same call asks for this database's maintenance worker, which is
-- there as soon as the installation has committed.
CREATE FUNCTION stint.require_preload() RETURNS void
    LANGUAGE c AS 'MODULE_PATHNAME', 'require_preload_wrapper';
SELECT stint.require_preload();
DROP FUNCTION stint.require_preload();

CREATE FUNCTION stint.library_version() RETURNS text
    LANGUAGE c STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
    AS 'MODULE_PATHNAME', 'library_version_wrapper';
COMMENT ON FUNCTION stint.library_version() IS
$$The version of the library this session runs; stint.version() puts it beside the extension's.$$;
REVOKE ALL ON FUNCTION stint.library_version() FROM PUBLIC;

CREATE FUNCTION stint.version() RETURNS text
    LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('pg_stint %s (library %s)', e.extversion, stint.library_version()) FROM pg_extension e WHERE e.extname = 'pg_stint'
$$;
COMMENT ON FUNCTION stint.version() IS
$$The version of the extension's SQL objects in this database and of the library the server runs. They are the same, except between installing a new library
and running ALTER EXTENSION pg_stint UPDATE.$$;
REVOKE ALL ON FUNCTION stint.version() FROM PUBLIC;
