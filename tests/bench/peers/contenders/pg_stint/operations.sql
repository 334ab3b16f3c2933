-- extend (heartbeat): claimed
select * from stint.extend('bench', :id::uuid, :lease::uuid);
-- fail, to be tried again: claimed
select * from stint.fail('bench', :id::uuid, :lease::uuid, 'the model answered 500');
-- release: claimed
select * from stint.release('bench', :id::uuid, :lease::uuid);
-- finish_and_claim: claimed
select * from stint.finish_and_claim('bench', :id::uuid, :lease::uuid, 'w') where kind = 'claimed';
-- enqueue with a key: nothing
select stint.enqueue('bench', :payload::jsonb, key => gen_random_uuid()::text);
-- enqueue for later: nothing
select stint.enqueue('bench', :payload::jsonb, delay => '1 hour');
-- claim that finds nothing: nothing
select * from stint.claim('bench, silent', 'w');
