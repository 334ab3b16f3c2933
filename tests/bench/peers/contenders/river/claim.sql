with locked as (
  select * from job where state = 'available' and queue = 'default' and scheduled_at <= now()
  order by priority, scheduled_at, id limit 1 for update skip locked
)
update job set state = 'running', attempt = job.attempt + 1, attempted_at = now(), attempted_by = array_append(job.attempted_by, 'w' || :client_id::text)
from locked where job.id = locked.id returning job.* \gset
with given as (
  select unnest(array[:id::bigint]) as id, now() as finalized_at
), found as (
  select job.id, given.finalized_at, job.metadata ? 'cancel_attempted_at' and false as cancelled
  from job join given on given.id = job.id where job.state = 'running' for update of job
), ended as (
  update job set finalized_at = found.finalized_at, state = case when found.cancelled then 'cancelled'::job_state else 'completed'::job_state end
  from found where job.id = found.id returning job.*
)
select * from job where id in (select id from given) and id not in (select id from ended)
union
select * from ended;
