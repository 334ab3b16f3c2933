"""Doorbells: the worker tells, once for many changes, and writers never do."""

import time

import pytest


@pytest.fixture
def listener(connect):
    conn = connect()
    conn.execute("LISTEN stint_queue")
    conn.execute("LISTEN stint_changes")
    return conn


def listen(conn, until, timeout=10):
    """Notifications as (seconds since the call, channel, payload, sender) until `until` says so of them, or the time is over."""
    started, heard = time.monotonic(), []
    while not until(heard) and time.monotonic() - started < timeout:
        conn.pgconn.consume_input()
        while (note := conn.pgconn.notifies()) is not None:
            heard.append((time.monotonic() - started, note.relname.decode(), note.extra.decode(), note.be_pid))
        time.sleep(0.005)
    return heard


def quiet(conn, seconds):
    """What is heard in a stretch of time."""
    return listen(conn, lambda heard: False, seconds)


def test_a_burst_of_commits_is_told_by_few_notifications_of_the_worker(processes, database, conn, listener):
    conn.execute("SELECT stint.create_queue('a \"b\" ü')")
    quiet(listener, 0.5)
    started_at = time.monotonic()
    for _ in range(500):
        conn.execute("SELECT stint.enqueue('a \"b\" ü', '{}')")
    took = time.monotonic() - started_at
    heard = listen(listener, bool) + quiet(listener, 0.5)
    assert {(channel, payload) for _, channel, payload, _ in heard} == {("stint_queue", 'a "b" ü')}
    assert {pid for *_, pid in heard} == {processes.worker(database)}
    # One for each stint.doorbell_interval begun, and the one that ends it.
    assert 1 <= len(heard) <= 2 + took / 0.05


def test_the_first_doorbell_after_a_silence_rings_at_once(started):
    server, processes = started(config={"stint.naptime": "60s", "stint.doorbell_interval": "50ms"})
    with server.connect("app") as listener, server.connect("app") as conn:
        conn.execute("SELECT stint.create_queue('q')")
        listener.execute("LISTEN stint_queue")
        quiet(listener, 0.2)
        conn.execute("SELECT stint.enqueue('q', '{}')")
        heard = listen(listener, bool)
        assert heard and heard[0][0] < 1  # and not the nap of a minute


def test_what_rolls_back_or_asks_for_silence_does_not_ring(processes, conn, listener):
    conn.execute("SELECT stint.create_queue('heard'), stint.create_queue('silent', notify => false), stint.create_queue('undone')")
    quiet(listener, 1)
    conn.execute("SELECT stint.enqueue('silent', '{}')")
    conn.execute("BEGIN")
    conn.execute("SELECT stint.enqueue('undone', '{}')")
    conn.execute("ROLLBACK")
    conn.execute("BEGIN")
    conn.execute("SAVEPOINT s")
    conn.execute("SELECT stint.enqueue('undone', '{}')")
    conn.execute("ROLLBACK TO s")
    conn.execute("SELECT stint.enqueue('heard', '{}')")
    conn.execute("COMMIT")
    heard = listen(listener, bool) + quiet(listener, 0.5)
    assert [payload for _, _, payload, _ in heard] == ["heard"]


def test_what_is_told_can_be_seen(processes, conn, listener):
    conn.execute("SELECT stint.create_queue('q')")
    quiet(listener, 0.5)
    for _ in range(20):
        conn.execute("SELECT stint.enqueue('q', '{}')")
        assert listen(listener, bool)
        assert listener.execute("SELECT id FROM stint.claim('q', 'w')").fetchone() is not None
        quiet(listener, 0.02)  # the claim rings, too


def test_changes_that_are_told_have_their_position(processes, conn, listener):
    conn.execute('CREATE SCHEMA "Stock"')
    conn.execute('CREATE TABLE "Stock".items (id int PRIMARY KEY, name text)')
    conn.execute("SELECT stint.create_state('\"Stock\".items', 'deduplicate')")
    conn.execute("SELECT stint.create_consumer('c', ARRAY['\"Stock\".items'::regclass])")
    quiet(listener, 0.5)
    for number in range(20):
        conn.execute("SELECT * FROM stint.merge('\"Stock\".items', jsonb_build_array(jsonb_build_object('id', %s::int)))", (number,))
        heard = listen(listener, bool)
        assert {(channel, payload) for _, channel, payload, _ in heard} == {("stint_changes", '"Stock".items')}
        ((key, pos),) = listener.execute("SELECT key->>'id', pos FROM stint.poll('c')").fetchall()
        assert int(key) == number
        listener.execute("SELECT stint.commit('c', %s)", (pos,))


def test_databases_do_not_hear_each_other(started):
    server, processes = started()
    server.create_database("second")
    processes.wait_for_worker("second")
    with server.connect("app") as here, server.connect("second") as there:
        for conn in here, there:
            conn.execute("SELECT stint.create_queue('q')")
            conn.execute("LISTEN stint_queue")
            quiet(conn, 0.5)
        with server.connect("second") as writer:
            writer.execute("SELECT stint.enqueue('q', '{}')")
        assert listen(there, bool)
        assert quiet(here, 0.5) == []


def test_what_was_rung_while_the_worker_was_away_is_told_when_it_is_back(processes, database, conn, listener):
    conn.execute("SELECT stint.create_queue('q')")
    quiet(listener, 0.5)
    old = processes.worker(database)
    conn.execute("SELECT pg_terminate_backend(%s, 5000)", (old,))
    conn.execute("SELECT stint.enqueue('q', '{}')")
    (first, *_) = listen(listener, bool)
    assert first[2] == "q" and first[3] not in (old, conn.info.backend_pid)


def test_a_doorbell_of_an_extension_made_anew_rings(processes, connect, listener):
    conn = connect(autocommit=False)
    conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint")
    conn.execute("CREATE EXTENSION pg_stint")
    conn.commit()
    conn.execute("SELECT stint.create_queue('q')")
    conn.execute("SELECT stint.enqueue('q', '{}')")
    conn.commit()
    assert [payload for _, _, payload, _ in listen(listener, bool)] == ["q"]
