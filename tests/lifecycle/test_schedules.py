"""What schedules remember is in tables: a restart, a crash, a pause and a dump lose nothing and fire nothing twice."""

import subprocess

import pytest
from cluster import bindir, clean_environment

FIRED = "SELECT count(*), count(DISTINCT slot) FROM stint.schedule_fires WHERE schedule = 'yearly'"


def make(server):
    with server.connect("app") as conn:
        conn.execute("SELECT stint.create_queue('q')")
        conn.execute("SELECT stint.create_schedule('q', 'paused', '* * * * *', '{}', catch_up => 'all')")
        conn.execute("SELECT stint.pause_schedule('paused')")
        conn.execute("SELECT stint.create_schedule('q', 'yearly', '0 0 1 1 *', '{}', catch_up => 'all')")
        conn.execute("UPDATE stint.schedule_config SET since = since - interval '3 years'")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_fires_no_slot_twice_and_keeps_the_pause(started, mode):
    server, processes = started()
    make(server)
    server.wait_until("SELECT count(*) >= 3 FROM stint.schedule_fires", dbname="app")
    tasks = server.sql("SELECT count(*) FROM stint.tasks", dbname="app")
    server.restart(mode)
    processes.wait_for_worker("app")
    processes.prove_at_work("app")
    with server.connect("app") as conn:
        count, slots = conn.execute(FIRED).fetchone()
        assert count == slots == tasks
        assert conn.execute("SELECT paused, next_fire, last_fire FROM stint.schedules WHERE schedule = 'paused'").fetchall() == [(True, None, None)]
        conn.execute("SELECT stint.resume_schedule('paused')")
        assert conn.execute("SELECT next_fire > clock_timestamp() - interval '1 s' FROM stint.schedules WHERE schedule = 'paused'").fetchone()[0]
    assert server.psql("SELECT * FROM stint.check()", "app") == ""


def test_a_restored_copy_fires_nothing_until_it_is_activated(started):
    server, processes = started()
    make(server)
    server.wait_until("SELECT count(*) >= 3 FROM stint.schedule_fires", dbname="app")
    dump = subprocess.run([bindir() / "pg_dump"], env=clean_environment() | server.env("app"), check=True, capture_output=True, text=True).stdout
    server.create_database("copy", extension=False)
    server.psql(dump, "copy")
    processes.wait_for_worker("copy")
    with server.connect("copy") as conn:
        conn.execute("UPDATE stint.schedule_config SET since = since - interval '1 s'; DELETE FROM stint.schedule_slots")
    changed_at = server.sql("SELECT clock_timestamp()")
    server.wait_until("SELECT last_clean_round > %s::timestamptz + interval '2 s' FROM stint.maintenance WHERE database = 'copy'", changed_at, dbname="copy", timeout=15)
    assert server.sql("SELECT count(*) FROM stint.schedule_fires", dbname="copy") == 0
    server.sql("SELECT stint.activate()", dbname="copy")
    server.wait_until("SELECT count(*) >= 3 FROM stint.schedule_fires", dbname="copy")
