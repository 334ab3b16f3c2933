-- Everything the audit needs, on an empty database: two queues, one budget, one state table, and plain tables for what
-- only the clients know (what their calls were answered, what the controller saw).
\set ON_ERROR_STOP on
\set QUIET on
set client_min_messages = warning;
\o /dev/null

create extension if not exists pg_stint;

select stint.create_budget('readers', max_running => :budget_running, max_tokens => :budget_tokens);

select stint.create_queue('extract',
    lease_for => make_interval(secs => :lease_seconds),
    backoff_base => '1 s', backoff_jitter => 0,
    budgets => '{readers}',
    comment => 'one task per /usr/share/doc/*/copyright');

select stint.create_queue('review', comment => 'packages under the watched licence, for a person to look at');

create table packages (
    package     text primary key,
    kind        text,
    licences    text[],
    holders     text[],
    confidence  real,
    licence_seq bigint,     -- when the extraction was finished, in microseconds
    version     text,
    size_kb     bigint,
    section     text,
    facts_seq   bigint      -- when dpkg last changed the package, in seconds
);

select stint.create_state('packages', engine => 'partial-update', groups => '{
    "licence_seq": ["kind", "licences", "holders", "confidence"],
    "facts_seq":   ["version", "size_kb", "section"]}');

-- The answer of every complete() call, kept by the worker that made it.
create table callbacks (
    at      timestamptz not null default clock_timestamp(),
    worker  text        not null,
    id      uuid        not null,
    attempt int         not null,
    call    text        not null,   -- 'on time', 'again' or 'late'
    outcome text        not null,
    first   bool        not null
);

-- The answer of every merge() call, kept by the writer that made it.
create table merges (
    writer text not null,
    pass   text not null,           -- 'new', 'again' or 'stale'
    inserted bigint, updated bigint, deleted bigint, unchanged bigint, late bigint
);

-- What enqueue_many() answered.
create table enqueued (ordinality int, id uuid, created bool);

-- What stint.budgets and stint.queue_stats showed, ten times a second.
create table samples (
    at               timestamptz not null default clock_timestamp(),
    running          bigint not null,
    tokens_in_flight bigint not null,
    ready            bigint not null,
    completed        bigint not null,
    next_tokens      bigint             -- what the smallest ready task needs
);

-- What stint.explain() said of the first task in line when the budget had no tokens for it.
create table explanations (
    at   timestamptz not null default clock_timestamp(),
    id   uuid not null,
    says text not null
);

-- Whom the controller killed, on which task.
create table kills (
    at      timestamptz not null default clock_timestamp(),
    worker  text not null,
    id      uuid not null,
    attempt int  not null
);
