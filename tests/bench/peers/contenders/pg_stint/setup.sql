CREATE EXTENSION pg_stint;
SELECT stint.create_queue('bench');
-- The same without doorbells, to show what they cost.
SELECT stint.create_queue('bench, silent', notify => false);
-- A limit of each kind with room for all: what being counted costs.
SELECT stint.create_budget('running', max_running => 1000000);
SELECT stint.create_budget('window', max_window_tokens => 1000000000000, per => '1 minute');
SELECT stint.create_queue('bench, one budget', budgets => '{running}');
SELECT stint.create_queue('bench, two budgets', budgets => '{running,window}');
-- Tasks that draw on this one as well never get room.
SELECT stint.create_budget('exhausted', max_running => 0);
