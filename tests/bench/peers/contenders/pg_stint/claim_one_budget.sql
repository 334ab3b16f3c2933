select * from stint.claim('bench, one budget', 'w' || :client_id::text) \gset
select * from stint.complete('bench, one budget', :id::uuid, :lease::uuid, input_tokens => 80, output_tokens => 20);
