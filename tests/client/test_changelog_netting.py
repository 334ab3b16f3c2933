"""What a transaction did to a key is one change: +I, -U and +U, -D, or nothing."""

import random
import threading

import psycopg.errors
import pytest

# What the net change of a transaction is told from, in plain SQL and Python: the positions of all changes, tick by tick.
RAW = """
    SELECT t.start_pos + row_number() OVER (PARTITION BY t.epoch, t.number ORDER BY l.seq) AS pos, l.xid::text, l.relation::text, l.key, l.before, l.after
    FROM stint.change_log l
    JOIN (SELECT epoch, number, snapshot, coalesce(lag(snapshot) OVER w, '1:1:') AS previous, coalesce(lag(end_pos) OVER w, 0) AS start_pos
          FROM stint.ticks WINDOW w AS (ORDER BY end_pos)) t
      ON t.epoch = l.epoch AND pg_visible_in_snapshot(l.xid, t.snapshot) AND NOT pg_visible_in_snapshot(l.xid, t.previous)
    ORDER BY 1
"""


def netted(raw, relations):
    """The changes that readers must get, of rows as RAW gives them: (pos, relation, kind, before, after)."""
    changes = {}
    for pos, xid, relation, key, before, after in raw:
        first = changes.pop((xid, relation, key), (None, None, before))
        changes[xid, relation, key] = (pos, relation, first[2], after)
    for pos, relation, before, after in sorted(changes.values()):
        if relation in relations and before != after:
            if before and after:
                yield pos, relation, "-U", before, None
                yield pos, relation, "+U", before, after
            else:
                yield pos, relation, "-D" if before else "+I", before, after


def declare(conn, name="goods"):
    conn.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state(%s::regclass, 'deduplicate')", (name,))


def image(id, qty):
    return {"id": id, "qty": qty}


NET = {
    "inserted and updated": (["INSERT 2 5", "UPDATE 2 6"], [("+I", None, image(2, 6))]),
    "born and dead": (["INSERT 2 5", "UPDATE 2 6", "DELETE 2"], []),
    "born, dead and born": (["INSERT 2 5", "DELETE 2", "INSERT 2 7"], [("+I", None, image(2, 7))]),
    "updated twice": (["UPDATE 1 5", "UPDATE 1 6"], [("-U", image(1, 0), None), ("+U", image(1, 0), image(1, 6))]),
    "there and back": (["UPDATE 1 5", "UPDATE 1 0"], []),
    "updated and deleted": (["UPDATE 1 5", "DELETE 1"], [("-D", image(1, 0), None)]),
    "deleted and inserted": (["DELETE 1", "INSERT 1 9"], [("-U", image(1, 0), None), ("+U", image(1, 0), image(1, 9))]),
    "deleted and inserted as it was": (["DELETE 1", "INSERT 1 0"], []),
    "deleted twice": (["DELETE 1", "INSERT 1 3", "DELETE 1"], [("-D", image(1, 0), None)]),
    "its key changed and changed back": (["UPDATE goods SET id = 2 WHERE id = 1", "UPDATE goods SET id = 1 WHERE id = 2"], []),
    "its key passed on": (
        ["UPDATE goods SET id = 2 WHERE id = 1", "INSERT 1 8"],
        [("+I", None, image(2, 0)), ("-U", image(1, 0), None), ("+U", image(1, 0), image(1, 8))],
    ),
    "a whole table replaced": (["TRUNCATE goods", "INSERT 1 0", "INSERT 2 2"], [("+I", None, image(2, 2))]),
    "rolled back in part": (["UPDATE 1 5", "SAVEPOINT s", "UPDATE 1 6", "ROLLBACK TO s"], [("-U", image(1, 0), None), ("+U", image(1, 0), image(1, 5))]),
    "two keys by turns": (
        ["UPDATE 1 5", "INSERT 2 1", "UPDATE 1 6", "UPDATE 2 2", "UPDATE 1 7"],
        [("+I", None, image(2, 2)), ("-U", image(1, 0), None), ("+U", image(1, 0), image(1, 7))],
    ),
}


def run(conn, step):
    match step.split():
        case ["INSERT", id, qty]:
            conn.execute("INSERT INTO goods VALUES (%s, %s)", (id, qty))
        case ["UPDATE", id, qty]:
            conn.execute("UPDATE goods SET qty = %s WHERE id = %s", (qty, id))
        case ["DELETE", id]:
            conn.execute("DELETE FROM goods WHERE id = %s", (id,))
        case _:
            conn.execute(step)


@pytest.mark.parametrize("how", NET)
def test_a_transaction_makes_one_change_of_a_key(conn, how):
    steps, expected = NET[how]
    declare(conn)
    conn.execute("INSERT INTO goods VALUES (1, 0)")
    with conn.transaction():
        for step in steps:
            run(conn, step)
    end = conn.execute("SELECT stint.tick()").fetchone()[0]
    found = conn.execute("SELECT pos, kind, before, after FROM stint.changes('goods', since_pos => 1)").fetchall()
    assert [row[1:] for row in found] == expected
    if expected and steps[-1].split()[0] != "ROLLBACK":
        assert found[-1][0] == end, "at the position of the last"


def test_two_transactions_of_one_tick_stay_two_changes(conn):
    declare(conn)
    for statement in "INSERT INTO goods VALUES (1, 0)", "UPDATE goods SET qty = 1", "UPDATE goods SET qty = 0", "DELETE FROM goods":
        conn.execute(statement)
    conn.execute("SELECT stint.tick()")
    assert [kind for (kind,) in conn.execute("SELECT kind FROM stint.changes('goods')")] == ["+I", "-U", "+U", "-U", "+U", "-D"]


def test_a_column_added_within_the_transaction_is_read_with_todays_columns(conn):
    declare(conn)
    conn.execute("INSERT INTO goods VALUES (1, 0)")
    with conn.transaction():
        conn.execute("UPDATE goods SET qty = 1")
        conn.execute("ALTER TABLE goods ADD COLUMN note text")
        conn.execute("UPDATE goods SET note = 'x'")
    conn.execute("SELECT stint.tick()")
    assert conn.execute("SELECT kind, before, after FROM stint.changes('goods', since_pos => 1)").fetchall() == [
        ("-U", image(1, 0) | {"note": None}, None),
        ("+U", image(1, 0) | {"note": None}, image(1, 1) | {"note": "x"}),
    ]


WRITERS, TRANSACTIONS, KEYS = 4, 60, 15


def write(conn, seed):
    """Random transactions that come back to their keys: in one statement or many, rolled back in part, in two tables; now and then a large one."""
    chance = random.Random(seed)
    for number in range(TRANSACTIONS):
        conn.execute("BEGIN")
        try:
            # Keys in order, so that writers do not deadlock; each several times.
            for key in sorted(chance.choices(range(KEYS), k=chance.randint(1, 6))):
                table = chance.choice(["one", "two"]) if key % 2 else "one"
                what = chance.random()
                if what < 0.35:
                    conn.execute(f"DELETE FROM {table} WHERE id = %s", (key,))
                elif what < 0.45:
                    conn.execute("SAVEPOINT s")
                    conn.execute(f"UPDATE {table} SET qty = -1 WHERE id = %s", (key,))
                    conn.execute("ROLLBACK TO s")
                else:
                    conn.execute(
                        f"INSERT INTO {table} VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET qty = excluded.qty", (key, chance.randint(0, 2))
                    )
            if seed == 0 and number % 20 == 10:
                base = 1000 * (number + 1)
                conn.execute("INSERT INTO two SELECT g, 0 FROM generate_series(%s::int, %s) g", (base, base + 2500))
                conn.execute("UPDATE two SET qty = 1 WHERE id BETWEEN %s AND %s", (base + 100, base + 300))
                conn.execute("DELETE FROM two WHERE id BETWEEN %s AND %s", (base + 200, base + 400))
            conn.execute("ROLLBACK" if chance.random() < 0.15 else "COMMIT")
        except psycopg.errors.DeadlockDetected:
            conn.execute("ROLLBACK")


@pytest.mark.parametrize("tables", [["one"], ["one", "two"]])
def test_consumers_get_exactly_the_net_changes_of_concurrent_transactions(connect, tables):
    conn = connect()
    for name in "one", "two":
        declare(conn, name)
    conn.execute("SELECT stint.create_consumer('reader', %s::regclass[])", (tables,))
    errors, stop = [], threading.Event()

    def guarded(work, *args):
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001
            errors.append(error)
            args[0].close()  # or its locks would hold up the others

    def tick(session):
        while not stop.wait(0.02):
            session.execute("SELECT stint.tick()")

    writers = [threading.Thread(target=guarded, args=(write, connect(), seed)) for seed in range(WRITERS)]
    ticker = threading.Thread(target=guarded, args=(tick, connect()))
    for thread in [*writers, ticker]:
        thread.start()
    chance = random.Random(7)
    # Two sessions take turns, so that what one remembers of a tick is never all.
    readers = [connect(), connect()]
    got, finished = [], False
    while True:
        reader = chance.choice(readers)
        last_look = finished
        with reader.transaction():
            batch = reader.execute("SELECT pos, relation::text, kind, before, after FROM stint.poll('reader', max => %s, wait => '20 ms')", (chance.choice([1, 7, 50, 900]),))
            batch = batch.fetchall()
            reader.execute("SELECT stint.commit('reader')")
            if chance.random() < 0.2:
                raise psycopg.Rollback()
            got += batch
            if last_look and not batch:
                break
        if not finished and not any(thread.is_alive() for thread in writers):
            stop.set()
            ticker.join()
            conn.execute("SELECT stint.tick()")
            finished = True
    assert errors == []

    raw = conn.execute(RAW).fetchall()
    assert [row[0] for row in raw] == list(range(1, conn.execute("SELECT max(end_pos) FROM stint.ticks").fetchone()[0] + 1)), "positions are dense"
    doc = lambda array: array and image(*map(int, array))  # noqa: E731
    assert got == [(pos, table, kind, doc(before), doc(after)) for pos, table, kind, before, after in netted(raw, tables)]
    assert conn.execute("SELECT pos, lag FROM stint.consumers").fetchone() == (len(raw), 0), "also past what was not for it"

    now = {}
    for _, table, kind, before, after in got:
        if kind != "-U":
            key = table, (before or after)["id"]
            assert now.get(key) == before, "each change of a key begins where the last one ended"
            now[key] = after
    live = {(table, id): image(id, qty) for table in tables for id, qty in conn.execute(f"SELECT id, qty FROM {table}")}
    assert {key: row for key, row in now.items() if row} == live
    for table in tables:
        again = conn.execute("SELECT pos, %s, kind, before, after FROM stint.changes(%s::regclass, max => 10000)", (table, table)).fetchall()
        assert again == [row for row in got if row[1] == table], "the same for every reader"


def buffers(conn, query):
    [[[plan]]] = conn.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {query}").fetchall()
    return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]


@pytest.mark.parametrize("transactions", [1, 3000])
def test_a_page_of_a_large_tick_costs_what_the_page_holds(connect, transactions):
    conn, other = connect(), connect()
    declare(conn)
    conn.execute("SELECT stint.create_consumer('reader', '{goods}')")
    each = 30_000 // transactions
    # Whoever ticks keeps others from it until the transaction ends.
    with other.transaction():
        other.execute("SELECT stint.tick()")
        for number in range(transactions):
            conn.execute("INSERT INTO goods SELECT g, 0 FROM generate_series(%s::int, %s) g", (number * each, (number + 1) * each - 1))
    conn.execute("SELECT stint.tick()")
    assert conn.execute("SELECT count(*), max(end_pos) FROM stint.ticks").fetchone() == (1, 30_000)
    pages = []
    for _ in range(20):
        page = "SELECT * FROM stint.poll('reader', max => 100)"
        conn.execute(page)
        pages.append(buffers(conn, page))
        with conn.transaction():
            conn.execute("SELECT FROM stint.poll('reader', max => 1000)")
            conn.execute("SELECT stint.commit('reader')")
    assert max(pages[1:]) < 100 * 16, "some pages of an index for each change, however far into the tick"
