select * from pgmq.send_batch('bench', :payloads::jsonb[]);
