-- The report. Every figure comes from the extension's views and functions, from `packages`, or from the answers that the
-- clients kept (callbacks, merges, samples); nothing is counted outside the database.
\set QUIET on
\pset border 1
\pset linestyle unicode
\pset footer off
\pset pager off
\pset null '–'
set client_min_messages = warning;

\echo
\echo '━━━ Licence audit ━━━'
\echo
\pset tuples_only on
\pset format unaligned
select format(E'%s documents, %s, read by %s workers in %s s: %s a second\n'
              '%s tokens, $%s; %s lapsed attempts recovered; %s repeated or late callbacks refused',
    (select completed from stint.queue_stats where queue = 'extract'),
    (select pg_size_pretty(sum((payload->>'bytes')::bigint)) from stint.task_payloads where queue = 'extract'),
    count(distinct worker),
    round(extract(epoch from max(ended_at) - min(started_at)), 1),
    round(count(distinct id) / extract(epoch from max(ended_at) - min(started_at)), 1),
    to_char(sum(input_tokens) + sum(output_tokens), 'FM999,999,999'), round(sum(model_cost), 2),
    count(*) filter (where ended = 'lapsed'),
    (select count(*) from callbacks where not first))
from stint.attempts where queue = 'extract';
\pset format aligned
\pset tuples_only off
\echo
\echo 'A reader really parses the document, then waits as long as a model reading' :read_pace 'tokens/s would.'
\echo 'A token is four bytes of the real texts. Dollars per million tokens:' :price_in 'in,' :price_out 'out.'
\echo
\echo '── The queues: where every task stands'
select queue, scheduled, ready, running, completed, failed, cancelled from stint.queue_stats order by queue;

\echo '── Trouble: one worker is killed, one oversleeps; the maintenance worker takes their tasks back'
select left(p.payload->>'package', 30) as package, l.worker as "lapsed with",
       case when exists (select from kills k where k.id = l.id and k.attempt = l.attempt) then 'killed' else 'overslept' end as why,
       n.worker as "taken up by", round(extract(epoch from n.started_at - l.started_at), 1) as "after s",
       coalesce(f.worker, l.worker || ', late') as "finished by"
from stint.attempts l
join stint.task_payloads p using (queue, id)
left join stint.attempts n on n.queue = l.queue and n.id = l.id and n.attempt = l.attempt + 1
left join stint.attempts f on f.queue = l.queue and f.id = l.id and f.ended = 'completed'
where l.queue = 'extract' and l.ended = 'lapsed'
order by l.started_at;

\echo '── Callbacks, as the workers were answered: one is accepted per task, whatever comes twice or late'
select call, outcome, case when first then 'accepted' else 'refused' end as "the answer was", count(*) as answers,
       string_agg(distinct worker, ' ' order by worker) as workers
from callbacks group by call, outcome, first order by call desc, answers desc;

\echo '── Tokens and cost by agent, lapsed attempts included'
select coalesce(agent, 'all') as agent, count(distinct id) as tasks, count(*) as attempts,
       to_char(sum(input_tokens), 'FM999,999,999') as "tokens in", to_char(sum(output_tokens), 'FM999,999,999') as "tokens out",
       to_char(sum(model_cost), 'FM$990.000000') as cost, round(avg(confidence)::numeric, 2) as confidence
from stint.attempts
where queue = 'extract'
group by rollup (agent) order by grouping(agent), agent;

\echo '── Run time of completed attempts, claim to callback, in ms'
select coalesce(a.worker, 'all') as worker, count(*) as tasks,
       round(percentile_cont(0.5) within group (order by ms)::numeric, 1) as median,
       round(percentile_cont(0.95) within group (order by ms)::numeric, 1) as p95,
       round(max(ms)::numeric, 1) as longest,
       round((count(*) / extract(epoch from max(ended_at) - min(started_at)))::numeric, 1) as "tasks per s"
from (select *, extract(epoch from run_time) * 1000 as ms
      from stint.attempts where queue = 'extract' and ended = 'completed') a
group by rollup (worker) order by grouping(worker), worker;

\echo '── The budget: how full, in ten samples a second while tasks were left'
select max(s.running) || ' of ' || b.max_running as "running, peak",
       to_char(max(s.tokens_in_flight), 'FM999,999') || ' of ' || to_char(b.max_tokens, 'FM999,999') as "tokens in flight, peak",
       round(100.0 * avg((s.running = b.max_running)::int)) || ' %' as "all running",
       round(100.0 * avg((s.running < b.max_running and s.next_tokens > b.max_tokens - s.tokens_in_flight)::int)) || ' %'
           as "held back by tokens"
from samples s, stint.budgets b
where b.budget = 'readers' and s.ready > 0
group by b.max_running, b.max_tokens;
\pset tuples_only on
\pset format unaligned
select format(E'Of %s, then the next in line, stint.explain() said:\n  %s\n', p.payload->>'package', e.says)
from explanations e join stint.task_payloads p using (id) limit 1;
\pset tuples_only off
\pset format aligned

\echo '── Two writers, one table: each fills its own columns; repeated or stale rows change nothing'
select writer, pass, count(*) as calls, sum(inserted) as inserted, sum(updated) as updated, sum(unchanged) as unchanged,
       sum(late) as late
from merges group by writer, pass order by writer desc, min(ctid);
select count(*) filter (where licence_seq is not null and facts_seq is not null) as "read and known to dpkg",
       count(*) filter (where licence_seq is null) as "known, no document",
       count(*) filter (where facts_seq is null) as "document, not known"
from packages;

\echo '── The ten commonest licences: now, and when half of the documents were read (tag half-way)'
with now as (select licence, count(*) as n from packages, unnest(licences) licence group by licence),
     half as (select licence, count(*) as n from packages_as_of(tag => 'half-way'), unnest(licences) licence group by licence)
select licence, now.n as now, coalesce(half.n, 0) as "half-way", now.n - coalesce(half.n, 0) as since,
       repeat('█', (40 * now.n / max(now.n) over ())::int) as packages
from now left join half using (licence)
order by now.n desc, licence limit 10;

\echo '── What the tag holds beside the present'
select 'half-way' as "at", count(*) as packages, count(licences) as "with licences", count(version) as "with facts",
       (select count(distinct l) from packages_as_of(tag => 'half-way'), unnest(licences) l) as "different licences",
       (select count(distinct h) from packages_as_of(tag => 'half-way'), unnest(holders) h) as "different holders"
from packages_as_of(tag => 'half-way')
union all
select 'now', count(*), count(licences), count(version),
       (select count(distinct l) from packages, unnest(licences) l), (select count(distinct h) from packages, unnest(holders) h)
from packages;

\echo '── The consumer of the changelog: reviews asked for packages under' :watched_licence '(the first five)'
select left(p.payload->>'package', 30) as package, p.payload->>'pos' as "at position", t.status,
       left((select string_agg(l, ', ') from jsonb_array_elements_text(p.payload->'licences') l), 42) as licences
from stint.tasks t join stint.task_payloads p using (queue, id)
where queue = 'review' order by (p.payload->>'pos')::bigint limit 5;

\echo '── stint.check(): every violation of the rules the tables must keep'
select rule, queue, id, detail from stint.check();

\echo '── What was expected'
select case when met then '✓' else '✗' end as met, expectation, seen from expectations order by number;
