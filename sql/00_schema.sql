-- The schema, made plainly: a schema of that name that somebody else made beforehand must stop the installation, not be adopted.
CREATE SCHEMA stint;
COMMENT ON SCHEMA stint IS 'pg_stint: the queue and the state of agent work';
