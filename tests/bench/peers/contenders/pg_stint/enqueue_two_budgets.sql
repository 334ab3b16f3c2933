select * from stint.enqueue_many('bench, two budgets', :tasks::jsonb);
