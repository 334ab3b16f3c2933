create function tell() returns trigger language plpgsql as $$begin perform pg_notify('river_insert', json_build_object('queue', 'default')::text); return null; end$$;
create trigger tell after insert on job for each statement execute function tell();
