-- The tables and indexes that a worker meets, written after River's migrations 2 to 6.
create type job_state as enum ('available', 'cancelled', 'completed', 'discarded', 'pending', 'retryable', 'running', 'scheduled');
create table job (
  id bigserial primary key,
  state job_state not null default 'available',
  attempt smallint not null default 0,
  max_attempts smallint not null,
  attempted_at timestamptz,
  created_at timestamptz not null default now(),
  finalized_at timestamptz,
  scheduled_at timestamptz not null default now(),
  priority smallint not null default 1 check (priority between 1 and 4),
  args jsonb not null default '{}',
  attempted_by text[],
  errors jsonb[],
  kind text not null check (char_length(kind) between 1 and 127),
  metadata jsonb not null default '{}',
  queue text not null default 'default' check (char_length(queue) between 1 and 127),
  tags varchar(255)[] not null default '{}',
  unique_key bytea,
  unique_states bit(8),
  constraint finalized check ((finalized_at is not null) = (state in ('cancelled', 'completed', 'discarded')))
);
create function in_bitmask(states bit(8), state job_state) returns boolean language sql immutable as $$
  select case state
    when 'available' then get_bit(states, 7) when 'cancelled' then get_bit(states, 6) when 'completed' then get_bit(states, 5) when 'discarded' then get_bit(states, 4)
    when 'pending' then get_bit(states, 3) when 'retryable' then get_bit(states, 2) when 'running' then get_bit(states, 1) when 'scheduled' then get_bit(states, 0)
    else 0 end = 1
$$;
create index job_kind on job (kind);
create index job_finalized on job (state, finalized_at) where finalized_at is not null;
create index job_fetching on job (state, queue, priority, scheduled_at, id);
create index job_args on job using gin (args);
create index job_metadata on job using gin (metadata);
create unique index job_unique on job (unique_key) where unique_key is not null and unique_states is not null and in_bitmask(unique_states, state);
