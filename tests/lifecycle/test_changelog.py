"""The changelog through restarts, crashes, prepared transactions and a dump."""

import subprocess
import time

import psycopg.errors
import pytest

READ = "SELECT pos, kind, key::text, before::text, after::text, changed_at FROM stint.changes('goods')"


@pytest.fixture
def goods(cluster):
    """A server with a state table in the database app, one change ticked."""
    server = cluster()
    server.create_database("app")
    with server.connect("app") as conn:
        conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty numeric)")
        conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
        conn.execute("INSERT INTO goods VALUES (1, 1.10)")
        conn.execute("SELECT stint.tick()")
        conn.execute("SELECT stint.tag('first')")
    return server


def test_changes_are_captured_and_tags_read_where_the_library_was_not_preloaded(goods):
    goods.preload = False
    goods.restart()
    with goods.connect("app") as conn:
        conn.execute("UPDATE goods SET qty = 2.20")
        conn.execute("TRUNCATE goods")
        assert conn.execute("SELECT qty::text FROM goods_as_of('first')").fetchall() == [("1.10",)]
    goods.preload = True
    goods.restart()
    with goods.connect("app") as conn:
        conn.execute("SELECT stint.tick()")
        assert [kind for _, kind, *_ in conn.execute(READ)] == ["+I", "-U", "+U", "-D"]


def test_positions_survive_a_crash(goods):
    with goods.connect("app") as conn:
        conn.execute("UPDATE goods SET qty = 2.20")
        conn.execute("SELECT stint.tick()")
        before = conn.execute(READ).fetchall()
        conn.execute("DELETE FROM goods")
    goods.crash()
    goods.start()
    with goods.connect("app") as conn:
        conn.execute("SELECT stint.tick()")
        after = conn.execute(READ).fetchall()
    assert after[: len(before)] == before
    assert [kind for _, kind, *_ in after[len(before) :]] == ["-D"]


def test_a_prepared_transaction_gets_its_positions_when_it_commits(goods):
    with goods.connect("app") as conn:
        conn.execute("BEGIN")
        conn.execute("INSERT INTO goods VALUES (2, 2)")
        conn.execute("PREPARE TRANSACTION 'later'")
        conn.execute("UPDATE goods SET qty = 3 WHERE id = 1")
        assert conn.execute("SELECT stint.tick()").fetchone()[0] == 2
    goods.crash()
    goods.start()
    with goods.connect("app") as conn:
        conn.execute("INSERT INTO goods VALUES (4, 4)")
        assert conn.execute("SELECT stint.tick()").fetchone()[0] == 3
        conn.execute("COMMIT PREPARED 'later'")
        assert conn.execute("SELECT stint.tick()").fetchone()[0] == 4
        assert [(pos, key) for pos, kind, key, *_ in conn.execute(READ) if kind != "-U"] == [
            (1, '{"id": 1}'), (2, '{"id": 1}'), (3, '{"id": 4}'), (4, '{"id": 2}'),
        ]  # fmt: skip


def test_ticks_write_nothing_while_nothing_changes(goods):
    with goods.connect("app") as conn:
        time.sleep(1)  # the worker tells of the change with a NOTIFY, which writes
        conn.execute("CHECKPOINT")
        place = "SELECT pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot())"
        before = conn.execute(place).fetchone()
        for _ in range(50):
            conn.execute("SELECT stint.tick()")
        assert conn.execute(place).fetchone() == before
        assert conn.execute("SELECT count(*) FROM stint.ticks").fetchone() == (1,)


def dump(server):
    return subprocess.run(["pg_dump", "--no-owner"], env=goods_environment(server.env("app")), check=True, stdout=subprocess.PIPE).stdout


def restore(server, text):
    server.create_database("copy", extension=False)
    command = ["psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", "copy"]
    subprocess.run(command, env=goods_environment(server.env("app")), input=text, check=True, stdout=subprocess.DEVNULL)


def test_a_restored_changelog_keeps_its_meaning_in_a_new_epoch(goods):
    with goods.connect("app") as conn:
        conn.execute("SELECT stint.create_consumer('c', ARRAY['goods']::regclass[])")
        conn.execute("UPDATE goods SET qty = 2.20")
        conn.execute("SELECT stint.tick()")
        conn.execute("SELECT stint.commit('c', 2)")
        conn.execute("SELECT stint.tag('second')")
        kept = conn.execute(READ).fetchall()
    restore(goods, dump(goods))
    with goods.connect("copy") as conn:
        assert conn.execute(READ).fetchall() == kept
        assert conn.execute("SELECT consumer, relations::text, pos, lag FROM stint.consumers").fetchall() == [("c", "{goods}", 2, 0)]
        assert conn.execute("SELECT qty::text FROM goods_as_of('first')").fetchall() == [("1.10",)]
        for statement in "UPDATE goods SET qty = 9", "SELECT stint.tick()", "SELECT stint.pin()":
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="copy of another") as caught:
                conn.execute(statement)
            assert "stint.activate" in caught.value.diag.message_hint
        assert conn.execute("SELECT stint.activate()").fetchone() == (2,)
        assert conn.execute("SELECT stint.activate()").fetchone() == (2,)
        conn.execute("UPDATE goods SET qty = 3.30")
        conn.execute("SELECT stint.tag('third')")
        conn.execute("DELETE FROM goods")
        conn.execute("SELECT stint.tick()")
        found = conn.execute(READ).fetchall()
        assert found[: len(kept)] == kept
        assert [(pos, kind) for pos, kind, *_ in found[len(kept) :]] == [(3, "-U"), (3, "+U"), (4, "-D")]
        for tag, qty in ("first", "1.10"), ("second", "2.20"), ("third", "3.30"):
            assert conn.execute("SELECT qty::text FROM goods_as_of(%s)", (tag,)).fetchall() == [(qty,)]
        assert [len(conn.execute("SELECT FROM goods_as_of(pos => %s)", (pos,)).fetchall()) for pos in range(5)] == [0, 1, 1, 1, 0]


def test_a_consumer_that_started_from_a_snapshot_goes_on_in_a_restored_database(goods):
    with goods.connect("app") as conn, goods.connect("app") as holder, holder.transaction():
        # The columns of the copy have other numbers.
        conn.execute("ALTER TABLE goods ADD COLUMN gone int, ADD COLUMN note text DEFAULT 'n'")
        conn.execute("ALTER TABLE goods DROP COLUMN gone")
        holder.execute("SELECT stint.tick()")  # and nobody else ticks until this transaction ends
        conn.execute("UPDATE goods SET qty = 2.20")
        with conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            conn.execute("SELECT stint.create_consumer('s', '{goods}', start => 'snapshot')")
            assert conn.execute("SELECT id, qty::text FROM goods").fetchall() == [(1, "2.20")]
        conn.execute("UPDATE goods SET qty = 3.30")
        assert conn.execute("SELECT pos, lag FROM stint.consumers").fetchone() == (1, 0)
        text = dump(goods)
    restore(goods, text)
    for database in "copy", "app":
        with goods.connect(database) as conn:
            conn.execute("SELECT stint.activate()")
            conn.execute("INSERT INTO goods VALUES (2, 0)")
            conn.execute("SELECT stint.tick()")
            rows = "SELECT kind, before ->> 'qty', after ->> 'qty', coalesce(after, before) ->> 'note' FROM stint.poll('s')"
            assert conn.execute(rows).fetchall() == [("-U", "2.20", None, "n"), ("+U", "2.20", "3.30", "n"), ("+I", None, "0", "n")]
            text = "SELECT kind, columns, image FROM stint.export_changes('goods', 1) WHERE kind <> '-U' AND key = '{1}'"
            assert conn.execute(text).fetchall()[-1] == ("+U", ["id", "qty", "note"], ["1", "3.30", "n"])


def test_columns_that_came_later_read_null_in_a_restored_database_too(goods):
    with goods.connect("app") as conn:
        conn.execute("ALTER TABLE goods ADD COLUMN gone int, ADD COLUMN colour text DEFAULT 'red'")
        conn.execute("ALTER TABLE goods DROP COLUMN gone; ALTER TABLE goods RENAME COLUMN colour TO paint")
        conn.execute("SELECT stint.tag('second')")
        assert conn.execute("SELECT count(paint) FROM goods_as_of('first')").fetchone() == (0,)
    restore(goods, dump(goods))
    with goods.connect("copy") as conn:
        seen = lambda tag: conn.execute("SELECT * FROM goods_as_of(%s)", (tag,)).fetchall()[0][2:]
        assert (seen("first"), seen("second")) == ((None,), ("red",))
        conn.execute("SELECT stint.activate()")
        assert (seen("first"), seen("second")) == ((None,), ("red",))
        conn.execute("ALTER TABLE goods RENAME COLUMN paint TO colour; ALTER TABLE goods ADD COLUMN extra int DEFAULT 1")
        assert (seen("first"), seen("second")) == ((None, None), ("red", None))
        assert conn.execute("SELECT * FROM stint.check()").fetchall() == []


def test_a_table_dropped_in_a_restored_database_takes_the_tables_beside_it_along(goods):
    beside = "SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ '(^gone_keys_|_tombstones$)'"
    with goods.connect("app") as conn:
        conn.execute("CREATE TABLE priced (id int PRIMARY KEY, at int); SELECT stint.create_state('priced', 'deduplicate', sequence => '{at}')")
    restore(goods, dump(goods))
    with goods.connect("copy") as conn:
        assert conn.execute(beside).fetchone() == (3,)
        conn.execute("DROP TABLE goods CASCADE")
        assert conn.execute(beside).fetchone() == (2,)
        conn.execute("SELECT stint.activate()")
        conn.execute("DROP TABLE priced CASCADE")
        assert conn.execute(beside).fetchone() == (0,)
        assert conn.execute("SELECT * FROM stint.check()").fetchall() == []


def goods_environment(env):
    import cluster

    return cluster.clean_environment() | env
