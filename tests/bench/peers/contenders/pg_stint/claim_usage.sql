select * from stint.claim('bench', 'w' || :client_id::text) \gset
select * from stint.complete('bench', :id::uuid, :lease::uuid, input_tokens => 80, output_tokens => 20);
