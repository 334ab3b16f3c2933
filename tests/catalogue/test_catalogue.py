"""What must hold for every object of the extension, read from the system catalogue: new ones are covered by being there."""

import importlib.machinery
import pathlib
import types

import psycopg
import pytest


@pytest.fixture(scope="module")
def installed(server):
    """A database with nothing but a fresh CREATE EXTENSION."""
    server.create_database("catalogue")
    with server.connect("catalogue") as connection:
        connection.execute("SET search_path = pg_catalog")
        yield connection
    server.drop_database("catalogue")


FUNCTIONS = """
    SELECT p.*, p.oid::regprocedure::text AS name, l.lanname
    FROM pg_proc p
    JOIN pg_language l ON l.oid = p.prolang
    WHERE p.pronamespace = 'stint'::regnamespace
"""

# Also the columns of views: they are written in queries as much as arguments are in calls.
RELATIONS = """
    SELECT c.*, c.oid::regclass::text AS name
    FROM pg_class c
    WHERE c.relnamespace = 'stint'::regnamespace
"""


def assert_none(connection, query):
    """The query finds what breaks the rule."""
    found = [" ".join(map(str, row)) for row in connection.execute(query)]
    assert not found, "\n".join(found)


# Functions


def test_every_function_has_a_comment(installed):
    assert_none(installed, f"SELECT name FROM ({FUNCTIONS}) f WHERE obj_description(f.oid, 'pg_proc') IS NULL")


def test_no_function_is_overloaded(installed):
    assert_none(installed, f"SELECT proname FROM ({FUNCTIONS}) f GROUP BY 1 HAVING count(*) > 1")


def test_every_argument_can_be_written_by_name(installed):
    """`name => value` takes an identifier; reserved words and names of types with a syntax of their own are none."""
    assert_none(
        installed,
        f"""
        SELECT f.name, a.argument
        FROM ({FUNCTIONS}) f,
             unnest(coalesce(f.proargmodes, array_fill('i'::"char", ARRAY[f.pronargs::int])),
                    coalesce(f.proargnames, array_fill(''::text, ARRAY[f.pronargs::int])))
                 AS a(mode, argument)
        WHERE a.mode IN ('i', 'b', 'v')
          AND f.prorettype <> 'trigger'::regtype
          AND (a.argument = ''
               OR a.argument IN (SELECT word FROM pg_get_keywords() WHERE catcode IN ('R', 'C')))
        """,
    )


def test_every_column_can_be_written_without_quotes(installed):
    """But for `check`, what stint.doctor() says it looked at: it is read by people, and there is no better word."""
    assert_none(
        installed,
        f"""
        SELECT f.name, a.argument
        FROM ({FUNCTIONS}) f, unnest(f.proargmodes, f.proargnames) AS a(mode, argument)
        WHERE a.mode IN ('o', 't')
          AND (f.proname, a.argument) <> ('doctor', 'check')
          AND (quote_ident(a.argument) <> a.argument
               AND a.argument NOT IN (SELECT word FROM pg_get_keywords() WHERE catcode = 'C'))
        UNION ALL
        SELECT r.name, a.attname
        FROM ({RELATIONS}) r
        JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE r.relkind IN ('r', 'p', 'v', 'm', 'c')
          AND (quote_ident(a.attname) <> a.attname
               AND a.attname NOT IN (SELECT word FROM pg_get_keywords() WHERE catcode = 'C'))
        """,
    )


def test_queue_is_the_first_argument_wherever_there_is_one(installed):
    """But where it is one filter among others, of functions that look at all queues unless it is given; and a watch is of a table, and names the queue of its tasks."""
    assert_none(
        installed,
        f"SELECT name FROM ({FUNCTIONS}) f WHERE array_position(proargnames[:pronargs], 'queue') BETWEEN 2 AND pronargs - pronargdefaults"
        " AND proname <> 'create_watch'",
    )


def test_every_function_pins_its_search_path(installed):
    """Verbs act with the owner's rights, so an operator that the caller's search_path finds first would, too.

    The body of an SQL-standard function is bound when it is created and needs no pin. The two that make and read a row's image run nothing but the types' own
    input and output functions, with the caller's rights, once for each row: a pin would cost them more than their work. So it would for
    the trigger of the places, which runs no SQL at every claim, and the number of the database, which is read for every attempt. The verbs of every task
    run no statement as a rule, and pin it when they do: test_a_hostile_search_path_is_not_searched_by_the_verbs_of_every_task.
    """
    assert_none(
        installed,
        f"""
        SELECT name
        FROM ({FUNCTIONS}) f
        WHERE f.prosqlbody IS NULL
          AND name NOT IN ('stint.image("any")', 'stint.image_row(anyelement,text[])', 'stint.placed()', 'stint.incarnation()')
          AND f.proname NOT IN ('enqueue', 'claim', 'complete', 'finish_and_claim')
          AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (f.proconfig), false)
        """,
    )


def test_functions_that_return_rows_name_their_columns(installed):
    assert_none(
        installed,
        f"""
        SELECT name
        FROM ({FUNCTIONS}) f
        JOIN pg_type t ON t.oid = f.prorettype
        WHERE (f.proretset OR t.oid = 'record'::regtype)
          AND t.typtype <> 'c'
          AND NOT coalesce(f.proargmodes && ARRAY['o', 'b', 't']::"char"[], false)
        """,
    )


def test_a_type_of_rows_has_a_comment_and_the_function_that_returns_it_names_its_columns(installed):
    """`\\df` shows no more than the name of the type."""
    assert_none(
        installed,
        f"""
        SELECT r.name
        FROM ({RELATIONS}) r
        LEFT JOIN ({FUNCTIONS}) f ON f.prorettype = r.reltype
        CROSS JOIN LATERAL (SELECT string_agg(attname, ', ' ORDER BY attnum) AS columns FROM pg_attribute WHERE attrelid = r.oid AND attnum > 0) a
        WHERE r.relkind = 'c'
          AND NOT coalesce(obj_description(r.reltype, 'pg_type') <> ''
                           AND strpos(obj_description(f.oid, 'pg_proc'), format('Returns %s (type %s).', a.columns, r.name)) > 0, false)
        """,
    )


# Rights


def test_public_has_no_privilege(installed):
    """An owner's default privileges count as given: for functions and types they name PUBLIC."""
    assert_none(
        installed,
        f"""
        WITH rights(name, acl) AS (
            SELECT 'schema stint', coalesce(nspacl, acldefault('n', nspowner))
            FROM pg_namespace WHERE nspname = 'stint'
            UNION ALL
            SELECT name, coalesce(proacl, acldefault('f', proowner)) FROM ({FUNCTIONS}) f
            UNION ALL
            SELECT name, coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner))
            FROM ({RELATIONS}) r WHERE relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
            UNION ALL
            SELECT r.name || '.' || a.attname, a.attacl
            FROM ({RELATIONS}) r JOIN pg_attribute a ON a.attrelid = r.oid
            UNION ALL
            SELECT 'type ' || t.oid::regtype, coalesce(t.typacl, acldefault('T', t.typowner))
            FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
            WHERE t.typnamespace = 'stint'::regnamespace
              AND (t.typtype IN ('d', 'e', 'r') OR c.relkind = 'c')
        )
        SELECT name, privilege_type FROM rights, aclexplode(acl) WHERE grantee = 0
        """,
    )


def test_no_view_shows_a_lease(installed):
    """Who knows a lease can end the attempt."""
    assert_none(
        installed,
        f"""
        SELECT r.name FROM ({RELATIONS}) r JOIN pg_attribute a ON a.attrelid = r.oid
        WHERE r.relkind IN ('v', 'm') AND a.attname ~ 'lease$'
        """,
    )


# Tables and views


def test_every_view_has_a_comment(installed):
    assert_none(
        installed,
        f"SELECT name FROM ({RELATIONS}) r WHERE relkind IN ('v', 'm') AND obj_description(oid, 'pg_class') IS NULL",
    )


def test_every_table_and_sequence_is_dumped(installed):
    """pg_dump leaves out the contents of an extension's tables unless they are marked."""
    assert_none(
        installed,
        f"""
        SELECT name
        FROM ({RELATIONS}) r
        JOIN pg_extension e ON e.extname = 'pg_stint'
        WHERE relkind IN ('r', 'p', 'S') AND NOT coalesce(r.oid = ANY (e.extconfig), false)
        """,
    )


def test_everything_in_the_schema_belongs_to_the_extension(installed):
    assert_none(
        installed,
        f"""
        SELECT name
        FROM (SELECT 'pg_class'::regclass AS class, oid, name FROM ({RELATIONS}) r WHERE relkind NOT IN ('i', 'I', 'c')
              UNION ALL
              SELECT 'pg_type'::regclass, reltype, name FROM ({RELATIONS}) r WHERE relkind = 'c'
              UNION ALL
              SELECT 'pg_proc'::regclass, oid, name FROM ({FUNCTIONS}) f
              UNION ALL
              SELECT 'pg_namespace'::regclass, oid, nspname FROM pg_namespace WHERE nspname = 'stint') o
        WHERE NOT EXISTS (SELECT FROM pg_depend d
                          WHERE d.classid = o.class AND d.objid = o.oid
                            AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e')
        """,
    )


def test_every_queue_column_is_text_in_c_collation(installed):
    assert_none(
        installed,
        f"""
        SELECT r.name, format_type(a.atttypid, a.atttypmod), l.collname
        FROM ({RELATIONS}) r
        JOIN pg_attribute a ON a.attrelid = r.oid
        LEFT JOIN pg_collation l ON l.oid = a.attcollation
        WHERE a.attname = 'queue' AND r.relkind IN ('r', 'p', 'v', 'm')
          AND (a.atttypid, l.collname) IS DISTINCT FROM ('text'::regtype::oid, 'C'::name)
        """,
    )


def test_no_table_of_ours_has_a_foreign_key(installed):
    """A parallel restore fills tables in any order, and those of an extension have their keys before it begins."""
    assert_none(
        installed,
        f"""
        SELECT r.name, k.conname
        FROM ({RELATIONS}) r
        JOIN pg_constraint k ON k.conrelid = r.oid AND k.contype = 'f'
        """,
    )


def test_every_queue_table_is_keyed_by_queue_first(installed):
    """So that one queue can be placed, granted and dumped as a unit: its key starts with it, every unique index holds it.

    A table partitioned by an expression can have no key; its partitions have theirs (test_every_partition_has_its_key).
    """
    assert_none(
        installed,
        f"""
        SELECT r.name, i.indexrelid::regclass::text
        FROM ({RELATIONS}) r
        JOIN pg_attribute a ON a.attrelid = r.oid AND a.attname = 'queue'
        LEFT JOIN pg_index i ON i.indrelid = r.oid AND i.indisunique
        WHERE r.relkind = 'r'
          AND (i.indexrelid IS NULL
               OR i.indisprimary AND i.indkey[0] <> a.attnum
               OR NOT a.attnum = ANY (i.indkey))
        """,
    )


# The extension itself


def test_control_file_flags(installed):
    flags = installed.execute(
        "SELECT superuser, trusted, relocatable, schema, requires FROM pg_available_extension_versions WHERE name = 'pg_stint'"
    ).fetchall()
    assert flags == [(True, False, False, "pg_catalog", None)]


def test_a_schema_made_by_somebody_else_is_not_adopted(server):
    """With IF NOT EXISTS, whoever made the schema first would own what is installed into it."""
    server.create_database("squatted", extension=False)
    try:
        with server.connect("squatted") as connection:
            connection.execute("CREATE SCHEMA stint")
            with pytest.raises(psycopg.errors.DuplicateSchema):
                connection.execute("CREATE EXTENSION pg_stint")
    finally:
        server.drop_database("squatted")


def test_the_reference_is_what_the_comments_say(installed):
    """docs/reference.md is made by scripts/reference; after a change: scripts/server run -- scripts/reference > docs/reference.md."""
    root = pathlib.Path(__file__).resolve().parents[2]
    loader = importlib.machinery.SourceFileLoader("reference", str(root / "scripts/reference"))
    module = types.ModuleType(loader.name)
    loader.exec_module(module)
    assert (root / "docs/reference.md").read_text() == module.reference(installed)
