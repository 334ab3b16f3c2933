//! pg_stint.
pgrx::pg_module_magic!(name, version);
pgrx::extension_sql!("CREATE SCHEMA stint;", name="boot", bootstrap);
