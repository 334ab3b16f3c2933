select * from stint.enqueue_many('bench', :later::jsonb);
