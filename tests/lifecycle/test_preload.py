"""Without the library in shared_preload_libraries nothing that needs it pretends to work, and what can be read is read."""

import psycopg
import pytest

LINE = "shared_preload_libraries = 'pg_stint'"

VERBS = [
    "SELECT stint.create_queue('other')",
    "SELECT stint.create_budget('b', max_running => 1)",
    "SELECT stint.enqueue('q', '{}')",
    "SELECT * FROM stint.enqueue_many('q', '[{\"payload\": {}}]')",
    "SELECT * FROM stint.claim('q', 'w')",
    "SELECT * FROM stint.sweep()",
    "SELECT stint.promote()",
    "SELECT * FROM stint.cancel('q', gen_random_uuid())",
    "SELECT * FROM stint.extend('q', gen_random_uuid(), gen_random_uuid())",
    "SELECT * FROM stint.complete('q', gen_random_uuid(), gen_random_uuid())",
    "SELECT * FROM stint.fail('q', gen_random_uuid(), gen_random_uuid(), 'error')",
    "SELECT * FROM stint.release('q', gen_random_uuid(), gen_random_uuid())",
    "SELECT stint.expire_keys()",
    "SELECT stint.create_state('other', 'deduplicate')",
    "SELECT stint.drop_state('items')",
    "SELECT * FROM stint.merge('items', '[{\"id\": 2}]')",
    "SELECT stint.tick()",
    "SELECT stint.create_consumer('c2', '{items}')",
    "SELECT * FROM stint.poll('c')",
    "SELECT stint.commit('c', 1)",
    "SELECT stint.drop_consumer('c')",
    "SELECT stint.pin()",
    "SELECT stint.tag('t')",
    "SELECT stint.drop_tag('t')",
]


def refused(conn, statement):
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as error:
        conn.execute(statement)
    assert error.value.sqlstate == "55000"
    assert LINE in error.value.diag.message_hint


def test_create_extension_is_refused_with_the_line_to_set(cluster):
    server = cluster(preload=False)
    with server.connect() as conn:
        refused(conn, "CREATE EXTENSION pg_stint")
        assert conn.execute("SELECT count(*) FROM pg_extension WHERE extname = 'pg_stint'").fetchone() == (0,)
        assert conn.execute("SELECT to_regnamespace('stint')").fetchone() == (None,)


def test_after_a_restart_without_the_library_verbs_fail_and_views_read(started):
    server, _ = started()
    server.sql("SELECT stint.create_queue('q')", dbname="app")
    server.sql("SELECT stint.enqueue('q', '{}')", dbname="app")
    with server.connect("app") as conn:
        conn.execute("CREATE TABLE items (id int PRIMARY KEY)")
        conn.execute("CREATE TABLE other (id int PRIMARY KEY)")
        conn.execute("SELECT stint.create_state('items', 'deduplicate')")
        conn.execute("SELECT * FROM stint.merge('items', '[{\"id\": 1}]')")
        conn.execute("SELECT stint.create_consumer('c', '{items}')")
        conn.execute("SELECT stint.tick()")
        conn.execute("SELECT stint.tag('t')")
    server.preload = False
    server.restart()
    with server.connect("app") as conn:
        for verb in VERBS:
            refused(conn, verb)
        assert conn.execute("SELECT queue, status FROM stint.tasks").fetchall() == [("q", "ready")]
        views = conn.execute("SELECT relname FROM pg_class WHERE relnamespace = 'stint'::regnamespace AND relkind = 'v'").fetchall()
        assert views
        for (view,) in views:
            conn.execute(f"SELECT * FROM stint.{view}").fetchall()
        doctor = conn.execute('SELECT "check", ok, hint FROM stint.doctor()').fetchall()
        off = {name: hint for name, ok, hint in doctor if not ok}
        assert LINE in off["library is preloaded"]
        assert {"launcher runs", "maintenance worker runs here"} <= off.keys()
        # A state table is the user's own: it takes writes, and none is missed.
        conn.execute("INSERT INTO items VALUES (2)")
    server.preload = True
    server.restart()
    server.wait_until("SELECT count(*) = 2 FROM stint.changes('items')", dbname="app")
    server.sql("SELECT stint.enqueue('q', '{}')", dbname="app")
    assert server.psql("SELECT * FROM stint.check()", "app") == ""


def test_the_extension_can_be_dropped_but_not_made_without_the_library(started):
    server, _ = started()
    server.preload = False
    server.restart()
    with server.connect("app") as conn:
        conn.execute("DROP EXTENSION pg_stint")
        refused(conn, "CREATE EXTENSION pg_stint")


def test_the_versions_are_told(started):
    server, _ = started()
    version = server.sql("SELECT extversion FROM pg_extension WHERE extname = 'pg_stint'", dbname="app")
    assert server.sql("SELECT stint.version()", dbname="app") == f"pg_stint {version} (library {version})"


def test_the_doctor_finds_a_sound_server_sound(started):
    server, _ = started(fsync=True)
    with server.connect("app") as conn:
        rows = conn.execute('SELECT "check", ok, detail, hint FROM stint.doctor()').fetchall()
        assert [row for row in rows if not row[1]] == []
        assert all(detail for _, _, detail, _ in rows)


def test_the_doctor_names_what_is_off_and_what_to_do(started):
    server, _ = started(config={"autovacuum": False})
    server.sql("SELECT pg_create_physical_replication_slot('idle')", dbname="app")
    server.configure(**{"stint.max_budgets": 2048})
    server.reload()
    server.wait_until("SELECT pending_restart FROM pg_settings WHERE name = 'stint.max_budgets'")
    with server.connect("app") as conn:
        conn.execute("SET default_transaction_isolation = 'repeatable read'")
        conn.execute("SET synchronous_commit = off")
        rows = {name: (ok, detail, hint) for name, ok, detail, hint in conn.execute("SELECT * FROM stint.doctor()")}
    for name in "settings are in force", "autovacuum is on", "replication slots are in use", "commits survive a crash", "transactions are READ COMMITTED":
        ok, detail, hint = rows[name]
        assert ok is False and detail and hint, name
    assert "stint.max_budgets" in rows["settings are in force"][1]
    assert "idle" in rows["replication slots are in use"][1]
