select * from stint.enqueue_many('bench', :withheld::jsonb);
