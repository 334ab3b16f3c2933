select stint.enqueue('bench', :payload::jsonb);
