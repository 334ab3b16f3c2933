"""Any table can be a state table: partitioned ones, ones with their own triggers and foreign keys, every type that has equality, and tables that are altered."""

import json
import random

import psycopg
import psycopg.errors
import pytest

from stint import parallel
from test_state_merge import merge, rows_of


def declare(conn, ddl, table, arguments="'deduplicate'"):
    conn.execute(ddl)
    conn.execute(f"SELECT stint.create_state('{table}', {arguments})")


def replayed(conn, table):
    """What the changes of a table amount to, each beginning where the last one of its key ended; images are texts in the root's layout."""
    now = {}
    for kind, key, before, after in conn.execute(
        "SELECT kind::text, key, before, after FROM stint.change_log WHERE relation = %s::regclass ORDER BY seq", (table,)
    ).fetchall():
        assert now.get(key) == before, f"{kind} {key} begins with {before}, not with {now.get(key)}"
        assert kind == {(True, False): "I", (True, True): "U", (False, True): "D"}[after is not None, before is not None]
        now[key] = after
    return sorted(image for image in now.values() if image is not None)


def live(conn, table, columns):
    return sorted(image for (image,) in conn.execute(f"SELECT stint.image({columns}) FROM {table}").fetchall())


PARTED = """
    CREATE TABLE goods (id int, gone text, region text, n int, note text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
    ALTER TABLE goods DROP COLUMN gone;
    CREATE TABLE goods_a PARTITION OF goods FOR VALUES IN ('a');
    CREATE TABLE goods_b (note text, scrap int, n int, region text NOT NULL, id int NOT NULL);
    ALTER TABLE goods_b DROP COLUMN scrap;
    ALTER TABLE goods ATTACH PARTITION goods_b FOR VALUES IN ('b');
    CREATE TABLE goods_c PARTITION OF goods FOR VALUES IN ('c') PARTITION BY RANGE (id);
    CREATE TABLE goods_c1 PARTITION OF goods_c FOR VALUES FROM (0) TO (100);
"""
# The dropped column has its place in an image still.
IMAGE = "id, NULL::text, region, n, note"


def test_changes_of_a_partitioned_table_are_captured_once_wherever_they_are_written(conn):
    declare(conn, PARTED, "goods")
    conn.execute("INSERT INTO goods (id, region, n) SELECT i, r, i FROM generate_series(1, 9) i, unnest('{a,b,c}'::text[]) r")
    conn.execute("SELECT stint.tag('before')")
    before = rows_of(conn, "goods")
    conn.execute("INSERT INTO goods_a (id, region, n) VALUES (20, 'a', 1)")
    conn.execute("INSERT INTO goods_c (id, region, n) VALUES (21, 'c', 1)")
    conn.execute("UPDATE goods_b SET note = 'direct' WHERE id < 3")
    conn.execute("UPDATE goods_c1 SET n = n + 1, id = id + 30 WHERE id < 3")
    conn.execute("UPDATE goods SET region = 'b', id = id + 40, note = 'moved' WHERE region = 'a' AND id > 5")
    conn.execute("DELETE FROM goods_c WHERE id = 4")
    conn.execute("DELETE FROM goods WHERE id = 3")
    conn.execute("MERGE INTO goods g USING (VALUES (1, 'a'), (77, 'c')) s (id, region) ON g.id = s.id AND g.region = s.region "
                 "WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT (id, region) VALUES (s.id, s.region)")  # fmt: skip
    assert replayed(conn, "goods") == live(conn, "goods", IMAGE)
    assert sorted(map(list, conn.execute("SELECT * FROM goods_as_of('before')").fetchall()), key=repr) == before
    assert conn.execute("SELECT count(DISTINCT relation) FROM stint.change_log").fetchone() == (1,)
    for truncated in "goods_c1", "goods_b", "goods":
        conn.execute(f"TRUNCATE {truncated}")
        assert replayed(conn, "goods") == live(conn, "goods", IMAGE), truncated
    assert sorted(map(list, conn.execute("SELECT * FROM goods_as_of('before')").fetchall()), key=repr) == before


def test_partitions_bring_and_take_their_rows(conn):
    declare(conn, PARTED, "goods")
    same = lambda: replayed(conn, "goods") == live(conn, "goods", IMAGE)
    conn.execute("CREATE TABLE goods_d PARTITION OF goods FOR VALUES IN ('d')")
    conn.execute("CREATE TABLE goods_e (LIKE goods); INSERT INTO goods_e (id, region) VALUES (1, 'e'), (2, 'e')")
    conn.execute("CREATE TABLE goods_f (LIKE goods) PARTITION BY LIST (id); CREATE TABLE goods_f1 PARTITION OF goods_f FOR VALUES IN (1)")
    conn.execute("INSERT INTO goods_f (id, region) VALUES (1, 'f')")
    conn.execute("ALTER TABLE goods ATTACH PARTITION goods_e FOR VALUES IN ('e'); ALTER TABLE goods ATTACH PARTITION goods_f FOR VALUES IN ('f')")
    assert same() and len(live(conn, "goods", IMAGE)) == 3
    conn.execute("CREATE TABLE goods_f2 PARTITION OF goods_f FOR VALUES IN (2)")
    for table, id, region in ("goods_d", 1, "d"), ("goods_e", 3, "e"), ("goods_f1", 1, "f"), ("goods_f2", 2, "f"), ("goods", 4, "e"):
        conn.execute(f"INSERT INTO {table} (id, region, n) VALUES (%s, %s, 1) ON CONFLICT (region, id) DO UPDATE SET n = 2", (id, region))
    assert same() and len(live(conn, "goods", IMAGE)) == 7
    conn.execute("ALTER TABLE goods DETACH PARTITION goods_e")
    assert same() and len(live(conn, "goods", IMAGE)) == 3
    logged = lambda: conn.execute("SELECT count(*) FROM stint.change_log").fetchone()[0]
    count = logged()
    conn.execute("UPDATE goods_e SET n = 9; TRUNCATE goods_e")
    assert logged() == count, "a detached table is its own"
    conn.execute("DROP TABLE goods_f")
    assert same() and len(live(conn, "goods", IMAGE)) == 1
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="cannot detach public.goods_d from a state table concurrently"):
        conn.execute("ALTER TABLE goods DETACH PARTITION goods_d CONCURRENTLY")
    conn.execute("CREATE TABLE above (id int, region text, PRIMARY KEY (id)) PARTITION BY LIST (id)")
    conn.execute("CREATE TABLE below (id int, region text, PRIMARY KEY (id))")
    conn.execute("SELECT stint.create_state('below', 'deduplicate')")
    with pytest.raises(psycopg.errors.WrongObjectType, match="the state table public.below cannot become a partition"):
        conn.execute("ALTER TABLE above ATTACH PARTITION below FOR VALUES IN (1)")
    conn.execute("CREATE UNLOGGED TABLE light (LIKE goods)")
    with pytest.raises(psycopg.errors.WrongObjectType, match="public.light cannot be a partition of the state table public.goods: it is unlogged"):
        conn.execute("ALTER TABLE goods ATTACH PARTITION light FOR VALUES IN ('x')")
    conn.execute("DROP TABLE above")
    conn.execute("SELECT stint.drop_state('goods')")
    assert conn.execute("SELECT count(*) FROM pg_trigger WHERE tgname LIKE '\\_stint%' AND tgrelid <> 'below'::regclass").fetchone() == (0,)
    conn.execute("DROP TABLE goods")


def test_a_role_that_does_not_own_the_partition_cannot_have_it_locked_or_logged(conn):
    declare(conn, PARTED, "goods")
    conn.execute("INSERT INTO goods (id, region) VALUES (1, 'a')")
    role = f"r_{conn.info.dbname}"
    conn.execute(f"CREATE ROLE {role}")
    try:
        for statement in "DROP TABLE goods_a", "ALTER TABLE goods DETACH PARTITION goods_a":
            conn.execute(f"SET ROLE {role}")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement)
            conn.execute("RESET ROLE")
        assert replayed(conn, "goods") == live(conn, "goods", IMAGE)
    finally:
        conn.execute("RESET ROLE")
        conn.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("arguments", ["'deduplicate'", "'deduplicate', sequence => '{n}'", "'partial-update'"])
def test_a_partitioned_table_merges_as_an_ordinary_one(conn, arguments):
    declare(conn, PARTED, "goods", arguments)
    declare(conn, "CREATE TABLE plain (id int, region text, n int, note text, PRIMARY KEY (region, id))", "plain", arguments)
    rng = random.Random(arguments)
    for _ in range(60):
        row = lambda: {"id": rng.randrange(6), "region": rng.choice("abc"), "n": rng.randrange(4), "note": rng.choice([None, "x", "y"])}
        batch = [row() for _ in range(rng.choice([1, 1, 2, 7]))]
        assert merge(conn, "goods", batch) == merge(conn, "plain", batch), batch
    columns = "id, region, n, note"
    assert live(conn, "goods", columns) == live(conn, "plain", columns)
    assert replayed(conn, "goods") == live(conn, "goods", IMAGE)


def test_changes_of_the_tables_own_triggers_follow_their_cause(conn):
    declare(conn, "CREATE TABLE t (id int PRIMARY KEY, n int, label text)", "t")
    conn.execute("""
        CREATE FUNCTION label() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.label IS DISTINCT FROM 'n is ' || NEW.n THEN UPDATE public.t SET label = 'n is ' || NEW.n WHERE id = NEW.id; END IF;
            IF NEW.n < 0 THEN DELETE FROM public.t WHERE id = NEW.id; END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER label AFTER INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION label();
        CREATE FUNCTION make_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.n > 100 THEN DELETE FROM public.t WHERE id = NEW.id; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER make_room BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION make_room();
    """)
    same = lambda: replayed(conn, "t") == live(conn, "t", "id, n, label")
    conn.execute("INSERT INTO t VALUES (1, 1), (2, 2), (3, -1)")
    assert same()
    conn.execute("UPDATE t SET n = n + 1")
    assert same()
    conn.execute("INSERT INTO t VALUES (1, 101), (9, 9), (2, 102)")
    assert same(), "the row that made room goes before the new one comes, and that is labelled after"
    merge(conn, "t", [{"id": 1, "n": 3}, {"id": 2, "n": -2}, {"id": 5, "n": 5}])
    merge(conn, "t", [{"id": 5, "n": 6}])
    assert same()
    conn.execute("BEGIN; UPDATE t SET n = 7 WHERE id = 5; SAVEPOINT s; UPDATE t SET n = 8 WHERE id = 5; ROLLBACK TO s; UPDATE t SET n = 9 WHERE id = 5; COMMIT")
    assert same()


def test_a_merge_statement_that_replaces_a_key_deletes_first(conn):
    declare(conn, "CREATE TABLE t (id int PRIMARY KEY, n int)", "t")
    conn.execute("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    conn.execute("MERGE INTO t USING (VALUES (1, 0), (2, 0), (99, 1)) s (n, to_be) ON t.n = s.n "
                 "WHEN MATCHED AND s.n = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET n = 20 WHEN NOT MATCHED THEN INSERT VALUES (s.to_be, s.n)")  # fmt: skip
    conn.execute("WITH gone AS (DELETE FROM t WHERE id = 3 RETURNING n) INSERT INTO t SELECT 4, n FROM gone")
    assert replayed(conn, "t") == live(conn, "t", "id, n")
    assert rows_of(conn, "t") == [[1, 99], [2, 20], [4, 3]]


def test_every_type_with_equality_keys_and_foreign_keys(conn):
    declare(
        conn,
        """
        CREATE TYPE mood AS ENUM ('bad', 'good'); CREATE DOMAIN positive AS int CHECK (VALUE > 0); CREATE DOMAIN moods AS mood[];
        CREATE TYPE pair AS (x int, y text);
        CREATE TABLE country (code text PRIMARY KEY);
        INSERT INTO country VALUES ('x');
        CREATE TABLE "Mixed ü" (
            a numeric, b timestamptz, c mood, d positive, e uuid, f int[], g jsonb,
            "V é" numeric(10, 2), h moods, i pair, j tstzrange, k bytea, l inet, m bit(3), o float8, p date[], q interval,
            country text REFERENCES country ON DELETE CASCADE, twice int GENERATED ALWAYS AS (d * 2) STORED, serial int GENERATED ALWAYS AS IDENTITY,
            by_default int GENERATED BY DEFAULT AS IDENTITY, PRIMARY KEY (a, b, c, d, e, f, g))
        """,
        '"Mixed ü"',
    )
    key = {"a": 1.10, "b": "2026-01-01 12:00:00+02", "c": "good", "d": 3, "e": "00000000-0000-0000-0000-000000000001", "f": [1, None], "g": {"k": [1.0]}}
    values = {"V é": 1.5, "h": ["bad", "good"], "i": {"x": 1, "y": "q"}, "j": "[2026-01-01,)", "k": "\\x00ff", "l": "10.0.0.1/8", "m": "101", "o": 0.1,
              "p": ["2026-01-01"], "q": "1 mon 2 days", "country": "x"}  # fmt: skip
    one, other = key | values, key | {"d": 4}
    assert merge(conn, '"Mixed ü"', [one]) == (1, 0, 0, 0, 0)
    assert merge(conn, '"Mixed ü"', [one]) == (0, 0, 0, 1, 0)
    # Another spelling of the same key.
    assert merge(conn, '"Mixed ü"', [one | {"a": "1.1", "b": "2026-01-01T10:00:00Z", "o": 0.2}, other]) == (1, 1, 0, 0, 0)
    assert conn.execute('SELECT count(*), min(twice), max(serial) > 0, count(by_default) FROM "Mixed ü"').fetchone() == (2, 6, True, 2)
    for broken in one | {"d": -1}, one | {"country": "nowhere"}, one | {"c": "so so"}:
        with pytest.raises(psycopg.Error) as error:
            merge(conn, '"Mixed ü"', [broken])
        assert error.value.sqlstate in ("23514", "23503", "22P02")
    with pytest.raises(psycopg.errors.GeneratedAlways):
        merge(conn, '"Mixed ü"', [one | {"serial": 4}])
    conn.execute("DELETE FROM country")
    columns = ", ".join(f'"{name}"' for (name,) in conn.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = '\"Mixed ü\"'::regclass AND attnum > 0 ORDER BY attnum").fetchall())  # fmt: skip
    assert replayed(conn, '"Mixed ü"') == live(conn, '"Mixed ü"', columns) and len(live(conn, '"Mixed ü"', columns)) == 1
    assert merge(conn, '"Mixed ü"', [other], "delete") == (0, 0, 1, 0, 0)


def test_a_declaration_says_what_an_alteration_took_from_it(conn):
    for name, arguments, ddl, message in (
        ("sequence", "'deduplicate', sequence => '{at}'", "DROP COLUMN at", 'column "at" of public.t does not exist'),
        ("renamed", "'deduplicate', sequence => '{at}'", "RENAME COLUMN at TO since", 'column "at" of public.t does not exist'),
        ("group", "'partial-update', groups => '{\"at\": [\"n\"]}'", "DROP COLUMN n", 'column "n" of public.t does not exist'),
        ("no order", "'deduplicate', sequence => '{at}'", "ALTER at TYPE point USING point(1, 1)", 'column "at" has a type without an order'),
    ):
        declare(conn, "CREATE TABLE t (id int PRIMARY KEY, at int, n int, other text)", "t", arguments)
        merge(conn, "t", [{"id": 1, "at": 1, "n": 1}])
        conn.execute(f"ALTER TABLE t {ddl}")
        for _ in range(2):
            with pytest.raises(psycopg.Error, match=message) as error:
                merge(conn, "t", [{"id": 1}])
            assert "stint.drop_state" in error.value.diag.message_hint, name
        # What the declaration does not name, the table itself still takes.
        conn.execute("UPDATE t SET other = 'x'")
        conn.execute("SELECT stint.drop_state('t'); SELECT stint.create_state('t', 'deduplicate'); DROP TABLE t CASCADE")


def test_tables_altered_between_merges_and_reads(conn):
    declare(conn, "CREATE TABLE t (id int PRIMARY KEY, n int, name text)", "t")
    merge(conn, "t", [{"id": 1, "n": 1, "name": "a"}])
    conn.execute("SELECT stint.tag('first')")
    conn.execute("ALTER TABLE t ADD COLUMN extra jsonb DEFAULT '[1]', ALTER n TYPE numeric(8, 2), DROP COLUMN name")
    assert merge(conn, "t", [{"id": 1, "n": 2.5, "extra": [2]}, {"id": 2, "n": 3}]) == (1, 1, 0, 0, 0)
    assert conn.execute("SELECT id, n::text, extra FROM t_as_of('first')").fetchall() == [(1, "1.00", None)], "the column was not there"
    conn.execute("ALTER TABLE t RENAME TO u; ALTER TABLE u RENAME COLUMN extra TO more; ALTER TABLE u ADD CHECK (n < 100)")
    assert merge(conn, "u", [{"id": 2, "n": 4, "more": None}]) == (0, 1, 0, 0, 0)
    conn.execute("ALTER TABLE u DROP CONSTRAINT t_pkey")
    with pytest.raises(psycopg.Error, match="public.u cannot be a state table: it has no primary key"):
        merge(conn, "u", [{"id": 2}])
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="public.u has lost its primary key"):
        conn.execute("UPDATE u SET n = 5")
    conn.execute("ALTER TABLE u ADD PRIMARY KEY (id)")
    assert merge(conn, "u", [{"id": 2, "n": 6}]) == (0, 1, 0, 0, 0)


def test_what_keeps_changes_out_of_the_changelog_is_reported(conn):
    declare(conn, PARTED, "goods")
    declare(conn, 'CREATE SCHEMA "Shop"; CREATE TABLE "Shop"."T" (id int PRIMARY KEY)', '"Shop"."T"')
    violations = lambda: conn.execute("SELECT detail FROM stint.check() WHERE rule = 'every change of a state table is captured' ORDER BY 1").fetchall()
    finding = lambda: conn.execute("SELECT ok, detail, hint FROM stint.doctor() WHERE \"check\" = 'changes of state tables are captured'").fetchone()
    assert violations() == [] and finding()[0]
    conn.execute('ALTER TABLE "Shop"."T" DISABLE TRIGGER _stint_capture_insert; ALTER TABLE goods_c1 DISABLE TRIGGER ALL')
    conn.execute("DROP TRIGGER _stint_capture_truncate ON goods")
    told = [detail for (detail,) in violations()]
    assert 'trigger _stint_capture_insert of "Shop"."T" is disabled' in told
    assert "trigger _stint_capture_truncate of public.goods is missing" in told
    assert "trigger _stint_capture_update of public.goods_c1 is disabled" in told
    assert len(told) == 6
    ok, detail, hint = finding()
    assert not ok and '"Shop"."T"' in detail and "public.goods_c1" in detail and hint
    conn.execute("SELECT stint.drop_state('goods'); SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute('ALTER TABLE "Shop"."T" ENABLE TRIGGER _stint_capture_insert')
    assert violations() == [] and finding()[0]


def test_a_subscribers_table_is_refused_and_reported(conn):
    conn.execute("CREATE TABLE early (id int PRIMARY KEY)")
    declare(conn, PARTED, "goods")
    conn.execute("CREATE SUBSCRIPTION copies CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false, slot_name = NONE)")
    try:
        conn.execute("SET allow_system_table_mods = on")
        conn.execute("INSERT INTO pg_subscription_rel SELECT s.oid, r, 'r' FROM pg_subscription s, unnest('{early,goods_a}'::regclass[]) r WHERE s.subname = 'copies'")
        conn.execute("RESET allow_system_table_mods")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match='public.early cannot be a state table: the subscription "copies" writes to it'):
            conn.execute("SELECT stint.create_state('early', 'deduplicate')")
        assert conn.execute("SELECT detail FROM stint.uncaptured()").fetchall() == [
            ('the subscription "copies" writes to public.goods_a, which fires no statement-level triggers',)
        ]
    finally:
        conn.execute("DROP SUBSCRIPTION copies")


def test_tombstones_left_by_a_dropped_extension_stand_in_nobodys_way(conn):
    declare(conn, "CREATE TABLE t (id int PRIMARY KEY, at int)", "t", "'deduplicate', sequence => '{at}'")
    merge(conn, "t", [{"id": 1, "at": 5}])
    merge(conn, "t", [{"id": 1, "at": 5}], "delete")
    conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint CASCADE; CREATE EXTENSION pg_stint")
    assert conn.execute("SELECT to_regclass('t_tombstones') IS NOT NULL").fetchone() == (True,)
    conn.execute("SELECT stint.create_state('t', 'deduplicate', sequence => '{at}')")
    assert merge(conn, "t", [{"id": 1, "at": 4}]) == (1, 0, 0, 0, 0)


def test_a_hot_key_written_by_eight_loses_nothing(connect):
    conn = connect()
    declare(conn, "CREATE TABLE hot (id int PRIMARY KEY, at int, who int, n int DEFAULT 0)", "hot", "'deduplicate', sequence => '{at}'")
    merge(conn, "hot", [{"id": 1, "at": 0}])
    connections = [connect() for _ in range(8)]

    def write(writer):
        changed = 0
        for turn in range(50):
            at = turn * 8 + writer + 1
            batch = [{"id": 1, "at": at, "who": writer, "n": turn}]
            changed += merge(connections[writer], "hot", batch if turn % 5 else [*batch, {"id": 2 + writer, "at": at}])[1]
        return changed

    parallel(8, write)
    assert conn.execute("SELECT at, who, n FROM hot WHERE id = 1").fetchone() == (400, 7, 49)
    assert replayed(conn, "hot") == live(conn, "hot", "id, at, who, n")
    sequence = [int(after[1]) for (after,) in conn.execute("SELECT after FROM stint.change_log WHERE key = '{1}' ORDER BY seq").fetchall()]
    assert sequence == sorted(set(sequence)), "the newest only ever gives way to a newer one"


def test_a_batch_in_one_row_tells_what_became_of_it(conn):
    declare(conn, "CREATE TABLE t (id int PRIMARY KEY, at int, n int)", "t", "'deduplicate', sequence => '{at}'")
    one = lambda at, n: merge(conn, "t", [{"id": 1, "at": at, "n": n}])
    assert [one(5, 1), one(5, 1), one(5, 2), one(4, 9), one(6, 2)] == [(1, 0, 0, 0, 0), (0, 0, 0, 1, 0), (0, 1, 0, 0, 0), (0, 0, 0, 0, 1), (0, 1, 0, 0, 0)]
    assert merge(conn, "t", [{"id": 1, "at": 7}], "delete") == (0, 0, 1, 0, 0)
    assert [one(6, 1), one(8, 1)] == [(0, 0, 0, 0, 1), (1, 0, 0, 0, 0)]
    conn.execute("CREATE TABLE g (id int PRIMARY KEY, s int, a int, free int)")
    conn.execute("SELECT stint.create_state('g', 'partial-update', groups => %s)", (json.dumps({"s": ["a"]}),))
    one = lambda **row: merge(conn, "g", [{"id": 1} | row])
    assert [one(s=2, a=1), one(s=1, a=2), one(s=1, a=2, free=3), one(free=3), one(a=7)] == [
        (1, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 1, 0, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 1, 0),
    ]  # fmt: skip


DEFERRED = """
    CREATE TABLE country (code text PRIMARY KEY); INSERT INTO country VALUES ('x');
    CREATE FUNCTION odd() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.n = 13 THEN RAISE EXCEPTION 'no 13' USING ERRCODE = '23514'; END IF; RETURN NULL; END $$;
    CREATE TABLE t (id int PRIMARY KEY, code text CONSTRAINT of_country REFERENCES country DEFERRABLE INITIALLY DEFERRED,
                    n int CONSTRAINT one_n UNIQUE DEFERRABLE);
    CREATE CONSTRAINT TRIGGER no_13 AFTER INSERT OR UPDATE ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION odd();
"""


@pytest.mark.parametrize("before", ["SELECT 1", "SET CONSTRAINTS ALL DEFERRED"])
def test_what_a_table_defers_is_checked_by_the_merge(conn, before):
    declare(conn, DEFERRED, "t")
    for row, sqlstate, says in ({"code": "later"}, "23503", "of_country"), ({"n": 1}, "23505", "one_n"), ({"n": 13}, "23514", "no 13"):
        conn.execute("BEGIN; " + before)
        assert merge(conn, "t", [{"id": 1, "code": "x", "n": 1}]) == (1, 0, 0, 0, 0)
        with pytest.raises(psycopg.Error, match=says) as error:
            merge(conn, "t", [{"id": 2} | row, {"id": 3}])
        assert error.value.sqlstate == sqlstate
        conn.execute("ROLLBACK")
    with conn.transaction():
        conn.execute(before)
        assert merge(conn, "t", [{"id": 1, "code": "x", "n": 1}, {"id": 2, "n": 2}]) == (2, 0, 0, 0, 0)
        conn.execute("INSERT INTO t VALUES (3, 'later', 3)")
        conn.execute("INSERT INTO country VALUES ('later')")
    conn.execute("BEGIN; INSERT INTO t VALUES (4, 'never', 4)")
    with pytest.raises(psycopg.errors.ForeignKeyViolation, match="of_country"):
        merge(conn, "t", [{"id": 1, "code": "x", "n": 9}])
    conn.execute("ROLLBACK")
    assert rows_of(conn, "t") == [[1, "x", 1], [2, None, 2], [3, "later", 3]]


def test_a_namesake_of_what_a_table_defers_is_not_run_for_its_owner(conn):
    declare(conn, DEFERRED, "t")
    conn.execute("CREATE TABLE other (n int)")
    conn.execute("CREATE CONSTRAINT TRIGGER no_13 AFTER INSERT ON other DEFERRABLE FOR EACH ROW EXECUTE FUNCTION odd()")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="public.t") as error:
        merge(conn, "t", [{"id": 1}])
    assert "public.no_13 of " in error.value.diag.message_detail and "other" in error.value.diag.message_detail
    conn.execute("DROP TABLE other")
    assert merge(conn, "t", [{"id": 1}]) == (1, 0, 0, 0, 0)


def test_a_projection_into_a_table_that_defers_checks_at_once(conn):
    declare(conn, DEFERRED, "t")
    columns = {"id": "payload.id", "code": "payload.code"}
    conn.execute("SELECT stint.create_projection(name => 'p', relation => 't', types => '{e}', columns => %s)", (json.dumps(columns),))
    for row in {"id": 1, "code": "x"}, {"id": 2, "code": "nowhere"}:
        conn.execute("SELECT stint.record(source => 's', type => 'e', payload => %s)", (json.dumps(row),))
    assert rows_of(conn, "t") == [[1, "x", None]]
    assert conn.execute("SELECT sqlstate FROM stint.poisoned_events").fetchall() == [("23503",)]
    conn.execute("DELETE FROM t")
    assert conn.execute("SELECT inserted FROM stint.rebuild('t', retry => false)").fetchone() == (1,)
