"""Tags, what is kept for them, and consumers give the same answers after a dump and restore into another cluster, and after a failover."""

import subprocess

import cluster as clusters
import psycopg.errors
import pytest
from stint import call, until, value

READS = [
    "SELECT r::text FROM goods_as_of('kept') r ORDER BY 1",
    "SELECT r::text FROM goods_as_of('recent') r ORDER BY 1",
    "SELECT r::text FROM goods_as_of('recent') r WHERE id = 3",
    "SELECT r::text FROM goods_as_of(pos => (SELECT floor_pos FROM stint.captures WHERE relation = 'goods'::regclass)) r ORDER BY 1",
    "SELECT r::text FROM goods_as_of(at => (SELECT max(at) FROM stint.ticks)) r ORDER BY 1",
    "SELECT kind, key::text, before::text, after::text FROM stint.diff('goods', 'kept', 'recent')",
    "SELECT kind, key::text, before::text, after::text FROM stint.diff('goods', 'recent')",
    "SELECT tag, pin, pinned_at, pos, hold, rows_kept FROM stint.tags ORDER BY 1",
    "SELECT pos, kind, key::text, after::text FROM stint.poll('c')",
]


@pytest.fixture
def goods(cluster):
    """A server with a state table that had columns dropped, a tag that lives of kept images, and one that lives of the changelog."""
    server = cluster()
    server.create_database("app")
    with server.connect("app") as conn:
        conn.execute("CREATE TABLE goods (gone int, id int PRIMARY KEY, also_gone text, qty numeric, note text)")
        conn.execute("ALTER TABLE goods DROP COLUMN gone")
        conn.execute("SELECT stint.create_state('goods', 'deduplicate', history => '1 hour')")
        conn.execute("INSERT INTO goods SELECT n, 'x', n, 'note ' || n FROM generate_series(1, 6) n")
        conn.execute("SELECT stint.tag('kept', hold => true)")
        conn.execute("UPDATE goods SET qty = 1.10 WHERE id <= 2")
        conn.execute("DELETE FROM goods WHERE id = 4")
        conn.execute("INSERT INTO goods VALUES (7, 'x', 7, 'new')")
        conn.execute("SELECT stint.tick()")
        conn.execute("UPDATE stint.ticks SET at = at - interval '1 day'")
        until(conn, "SELECT NOT (SELECT more FROM stint.expire_changes())")
        assert value(conn, "SELECT count(*) FROM stint.change_log") == 0 and value(conn, "SELECT rows_kept FROM stint.tags") == 4
        conn.execute("SELECT stint.create_consumer('c', '{goods}', start => 'latest')")
        conn.execute("ALTER TABLE goods DROP COLUMN also_gone")
        conn.execute("SELECT stint.tag('recent')")
        conn.execute("UPDATE goods SET note = note || '!' WHERE id IN (2, 3)")
        conn.execute("DELETE FROM goods WHERE id IN (3, 5)")
        conn.execute("SELECT stint.tick()")
    return server


def answers(conn):
    return {read: conn.execute(read).fetchall() for read in READS}


def goes_on(conn, before):
    """New changes, tags and retention after what was brought along."""
    assert answers(conn) == before
    conn.execute("UPDATE goods SET qty = qty + 1 WHERE id IN (1, 2)")
    conn.execute("INSERT INTO goods VALUES (3, 33, 'again')")
    conn.execute("SELECT stint.tag('here')")
    here = conn.execute("SELECT r::text FROM goods r ORDER BY 1").fetchall()
    conn.execute("DELETE FROM goods")
    unchanged = [read for read in READS[:6] if "floor_pos" not in read and "max(at)" not in read]

    def same():
        assert all(conn.execute(read).fetchall() == before[read] for read in unchanged)
        assert conn.execute("SELECT r::text FROM goods_as_of('here') r ORDER BY 1").fetchall() == here

    same()
    conn.execute("SELECT stint.tick()")
    conn.execute("UPDATE stint.ticks SET at = at - interval '1 day'")
    until(conn, "SELECT NOT (SELECT more FROM stint.expire_changes())")
    assert value(conn, "SELECT count(*) FROM stint.change_log") == 0
    same()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        conn.execute("SELECT stint.drop_tag('kept')")
    assert call(conn, "check") == []


def test_tags_and_consumers_answer_the_same_in_another_cluster(goods, cluster):
    with goods.connect("app") as conn:
        before = answers(conn)
    env = clusters.clean_environment()
    dump = subprocess.run(["pg_dump", "--no-owner"], env=env | goods.env("app"), check=True, stdout=subprocess.PIPE).stdout
    other = cluster()
    other.create_database("copy", extension=False)
    for _ in range(300):  # so that transaction ids of the two overlap
        other.sql("SELECT pg_current_xact_id()", dbname="copy")
    subprocess.run(["psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", "copy"], env=env | other.env("copy"), input=dump, check=True, stdout=subprocess.DEVNULL)
    with other.connect("copy") as conn:
        assert answers(conn) == before
        assert call(conn, "activate")
        goes_on(conn, before)


def test_tags_and_consumers_answer_the_same_after_a_failover(goods):
    with goods.connect("app") as conn:
        before = answers(conn)
    standby = goods.standby()
    try:
        standby.wait_for_replay(goods)
        with standby.connect("app") as conn:
            reads = [read for read in READS if "poll" not in read]
            assert all(conn.execute(read).fetchall() == before[read] for read in reads), "a standby answers readers"
        goods.stop("immediate")
        standby.promote()
        with standby.connect("app") as conn:
            goes_on(conn, before)
    finally:
        standby.destroy()


def test_a_parallel_restore_is_left_alone_and_followed_at_activation(goods, tmp_path):
    env = clusters.clean_environment() | goods.env("app")
    with goods.connect("app") as conn:
        conn.execute("CREATE ROLE reader; CREATE ROLE clerk")
        for n in range(6):
            conn.execute(f"CREATE TABLE more_{n} (id int PRIMARY KEY)")
            conn.execute(f"SELECT stint.create_state('more_{n}', 'deduplicate')")
            conn.execute(f"INSERT INTO more_{n} SELECT generate_series(1, 2000); DELETE FROM more_{n} WHERE id > 1000; ALTER TABLE more_{n} OWNER TO clerk")
        before = answers(conn)
    subprocess.run([clusters.bindir() / "pg_dump", "-Fd", "-f", tmp_path / "dump"], env=env, check=True)
    goods.create_database("copy", extension=False)
    subprocess.run([clusters.bindir() / "pg_restore", "-j", "4", "-e", "-d", "copy", tmp_path / "dump"], env=env, check=True)
    with goods.connect("copy") as conn:
        assert answers(conn) == before
        readers = "SELECT has_table_privilege('reader', c.gone_keys, 'SELECT') FROM stint.captures c WHERE c.relation = 'goods'::regclass"
        conn.execute("GRANT SELECT ON goods TO reader")
        assert not value(conn, readers)
        conn.execute("SELECT stint.activate()")
        assert value(conn, readers)
        conn.execute("REVOKE SELECT ON goods FROM reader")
        assert not value(conn, readers)
        assert answers(conn) == before
