create table floor (id bigint generated always as identity primary key, payload jsonb not null);
