-- What must have happened, each with what was seen. `run` ends with status 0 only if every line is met.
create view expectations as
with
documents as (select count(*) as n from enqueued where created),
statuses as (select status, count(*) as n from stint.tasks where queue = 'extract' group by status),
peak as (select max(running) as running, max(tokens_in_flight) as tokens from samples),
room as (select b.max_running, b.max_tokens from stint.budgets b where budget = 'readers')
select * from (values
    (1, 'every document is one completed task',
        (select string_agg(n || ' ' || status, ', ') from statuses),
        (select count(*) = 1 and bool_and(status = 'completed' and s.n = d.n) from statuses s, documents d)),
    (2, 'each task has one accepted answer',
        (select count(*) filter (where first) || ' of ' || count(*) || ' answers' from callbacks),
        (select count(*) filter (where first) = (select n from documents)
                and count(distinct id) filter (where first) = (select n from documents) from callbacks)),
    (3, 'a batch sent twice made no second tasks',
        (select count(*) || ' asked, ' || count(*) filter (where created) || ' made' from enqueued),
        (select count(*) > count(distinct id) and count(distinct id) = count(*) filter (where created) from enqueued)),
    (4, 'the killed worker''s task was finished by another',
        (select count(*) || ' recovered' from kills k join stint.attempts a on a.id = k.id and a.ended = 'completed'
         where a.worker <> k.worker),
        (select count(*) > 0 and bool_and(
                    exists (select from stint.attempts a
                            where a.queue = 'extract' and a.id = k.id and a.attempt = k.attempt and a.ended = 'lapsed')
                    and exists (select from stint.attempts a
                                where a.queue = 'extract' and a.id = k.id and a.worker <> k.worker and a.ended = 'completed'))
         from kills k)),
    (5, 'repeated callbacks changed nothing',
        (select count(*) || ' repeated, ' || count(*) filter (where first) || ' accepted' from callbacks where call = 'again'),
        (select count(*) filter (where outcome = 'already_completed') > 0 and count(*) filter (where first) = 0
         from callbacks where call = 'again')),
    (6, 'late ones: kept if the task still waits, else refused',
        (select string_agg(outcome, ', ' order by at) from callbacks where call = 'late'),
        (select count(*) = 2 and count(*) filter (where not first and outcome in ('superseded', 'already_finished')) >= 1
                and bool_and(first = (outcome = 'completed'))
         from callbacks where call = 'late')),
    (7, 'the budget kept its limits; tokens held work back',
        (select p.running || '/' || r.max_running || ' running, ' || p.tokens || '/' || r.max_tokens || ' tokens'
         from peak p, room r),
        (select p.running <= r.max_running and p.tokens <= r.max_tokens
                and exists (select from samples s
                            where s.running < r.max_running and s.next_tokens > r.max_tokens - s.tokens_in_flight)
         from peak p, room r)),
    (8, 'every result is in packages',
        (select count(*) || ' rows' from packages where licence_seq is not null),
        (select count(*) = (select n from documents) from packages where licence_seq is not null)),
    (9, 'repeated and stale facts changed nothing',
        (select coalesce(sum(unchanged) filter (where pass = 'again'), 0) || ' unchanged, '
             || coalesce(sum(late) filter (where pass = 'stale'), 0) || ' late' from merges where writer = 'facts'),
        (select sum(inserted + updated) filter (where pass <> 'new') = 0
                and sum(unchanged) filter (where pass = 'again') = count_facts.n
                and sum(late) filter (where pass = 'stale') = count_facts.n
         from merges, (select count(*) as n from packages where facts_seq is not null) count_facts
         where writer = 'facts' group by count_facts.n)),
    (10, 'the tag reads as its own transaction saw it',
        (select count(*) || ' rows then, ' || (select count(*) from packages) || ' now' from half_way_seen),
        (select (select count(*) from half_way_seen) > 0
                and not exists (select to_jsonb(s)::text from half_way_seen s
                                except all select to_jsonb(t)::text from packages_as_of(tag => 'half-way') t)
                and not exists (select to_jsonb(t)::text from packages_as_of(tag => 'half-way') t
                                except all select to_jsonb(s)::text from half_way_seen s))),
    (11, 'reviews are just the packages under ' || :'watched_licence',
        (select count(*) || ' reviews' from stint.tasks where queue = 'review'),
        (select count(*) > 0 and not exists (
                    (select p.payload->>'package' from stint.task_payloads p where p.queue = 'review')
                    except all
                    (select package from packages
                     where licences && array[:'watched_licence', :'watched_licence' || '+']))
                and count(*) = (select count(*) from packages
                                where licences && array[:'watched_licence', :'watched_licence' || '+'])
         from stint.tasks where queue = 'review')),
    (12, 'stint.check() finds nothing',
        (select count(*) || ' violations' from stint.check()),
        (select count(*) = 0 from stint.check()))
) as e (number, expectation, seen, met);
