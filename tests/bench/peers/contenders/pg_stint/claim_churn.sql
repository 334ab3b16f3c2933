-- Every task has a heartbeat; one in ten fails and comes back a second later; of one in fifty the worker dies, and the sweep takes it back.
\set turn random(1, 50)
select * from stint.claim('bench', 'w' || :client_id::text, lease_for => case when :turn::int = 1 then interval '1 s' end) \gset
select * from stint.extend('bench', :id::uuid, :lease::uuid, progress => '{"half": true}');
select case when :turn::int between 2 and 6 then (select outcome from stint.fail('bench', :id::uuid, :lease::uuid, 'the model answered 500', retry_in => '1 s'))
            when :turn::int > 6 then (select outcome from stint.complete('bench', :id::uuid, :lease::uuid)) end;
