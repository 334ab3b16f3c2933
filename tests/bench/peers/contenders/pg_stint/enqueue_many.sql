select * from stint.enqueue_many('bench', :tasks::jsonb);
