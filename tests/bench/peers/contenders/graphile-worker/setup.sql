insert into graphile_worker._private_tasks (identifier) values ('bench');
