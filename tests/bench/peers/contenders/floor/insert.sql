insert into floor (payload) values (:payload::jsonb);
