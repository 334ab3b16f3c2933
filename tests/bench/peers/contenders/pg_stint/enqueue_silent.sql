select stint.enqueue('bench, silent', :payload::jsonb);
