select * from stint.enqueue_many('bench, one budget', :tasks::jsonb);
