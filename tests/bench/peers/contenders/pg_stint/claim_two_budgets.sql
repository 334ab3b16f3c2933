select * from stint.claim('bench, two budgets', 'w' || :client_id::text) \gset
select * from stint.complete('bench, two budgets', :id::uuid, :lease::uuid, input_tokens => 80, output_tokens => 20);
