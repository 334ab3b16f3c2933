"""Apache Paimon's own cases: every table of them with every split of its inputs into batches. Their changelogs are in test_paimon_changelog.py."""

import itertools
import json
import pathlib

import pytest

CASES = {case["id"]: case for case in json.loads((pathlib.Path(__file__).parents[1] / "cases/paimon.json").read_text())}
TYPES = {"INT": "integer", "BIGINT": "bigint", "DOUBLE": "double precision", "STRING": "text"}


def declaration(case):
    """The arguments of create_state that Paimon's options stand for."""
    told = {"relation": "cases", "engine": case["engine"], "rowkind": "kind"}
    groups, fields, removes = {}, {}, None
    for option, value in case["options"].items():
        if option == "sequence.field":
            told["sequence"] = value.split(",")
        elif option == "fields.default-aggregate-function":
            fields.setdefault("*", {})["function"] = value
        elif option.endswith(".sequence-group"):
            groups[option.removeprefix("fields.").removesuffix(".sequence-group")] = value.split(",")
        elif option.startswith("fields."):
            _, column, setting = option.split(".")
            name = {"aggregate-function": "function", "ignore-retract": "ignore_retract", "list-agg-delimiter": "separator"}[setting]
            fields.setdefault(column, {})[name] = value == "true" if name == "ignore_retract" else value
        elif option == "ignore-delete":
            told["deletes"] = "ignore"
        elif option.endswith(".remove-record-on-delete"):
            told["deletes"] = "remove"
        elif option == "partial-update.remove-record-on-sequence-group":
            removes = value
        else:
            assert option in ("merge-engine", "changelog-producer", "changelog-producer.row-deduplicate"), option
    if removes:
        groups[removes] = {"fields": groups[removes], "on_delete": "remove"}
    return told | ({"groups": json.dumps(groups)} if groups else {}) | ({"fields": json.dumps(fields)} if fields else {})


def declare(conn, case):
    columns = [column.rsplit(" ", 1) for column in case["columns"]]
    body = ", ".join(f'"{name}" {TYPES[kind]}' for name, kind in columns)
    key = ", ".join(f'"{name}"' for name in case["key"])
    conn.execute(f"CREATE TABLE cases ({body}, PRIMARY KEY ({key}))")
    told = declaration(case)
    conn.execute(f"SELECT stint.create_state({', '.join(f'{name} => %({name})s' for name in told)})", told)
    return [name for name, _ in columns]


def batch(names, inputs):
    return [dict(zip(names, event["row"])) | {"kind": event["kind"]} for event in inputs]


# Merges batch after batch and returns what the table and its tombstones hold after each.
FEED = """
CREATE FUNCTION feed(batches jsonb) RETURNS TABLE (rows jsonb, dead jsonb) LANGUAGE plpgsql AS $$
DECLARE batch jsonb;
BEGIN
    FOR batch IN SELECT jsonb_array_elements(batches) LOOP
        PERFORM * FROM stint.merge('cases', batch);
        SELECT coalesce(jsonb_agg(to_jsonb(held)), '[]') INTO rows FROM cases held;
        IF to_regclass('cases_tombstones') IS NOT NULL THEN
            EXECUTE 'SELECT coalesce(jsonb_agg(to_jsonb(held)), ''[]'') FROM cases_tombstones held' INTO dead;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$
"""


def splits(inputs):
    for length in range(len(inputs)):
        for cuts in itertools.combinations(range(1, len(inputs)), length):
            edges = [0, *cuts, len(inputs)]
            yield [inputs[start:end] for start, end in zip(edges, edges[1:])]


def expected_tombstone(case, row):
    """Key, sequences and mark of the tombstone for a deleted row: it keeps no more of it."""
    names = [column.rsplit(" ", 1)[0] for column in case["columns"]]
    value = dict(zip(names, row))
    orders = sorted(option.split(".")[1] for option in case["options"] if option.endswith(".sequence-group"))
    tombstone = {f"k{place}": value[name] for place, name in enumerate(case["key"])} | {"removed": True}
    return tombstone | {f"s{g}_{j}": value[name] for g, order in enumerate(orders) for j, name in enumerate(order.split(","))}


@pytest.mark.parametrize("case_id", [case_id for case_id, case in CASES.items() if "expected_error" not in case])
def test_a_paimon_case_gives_its_rows_in_every_split(conn, case_id):
    case = CASES[case_id]
    names = declare(conn, case)
    conn.execute(FEED)
    inputs = case["inputs"]
    points = {point["after"]: point for point in case.get("checkpoints", [])}
    points[len(inputs)] = {"rows": case["expected_rows"]} | ({"tombstone": case["expected_tombstone"]} if "expected_tombstone" in case else {})
    seen = 0
    for split in splits(inputs):
        with conn.transaction(force_rollback=True):
            answers = conn.execute("SELECT * FROM feed(%s)", (json.dumps([batch(names, part) for part in split]),)).fetchall()
        for done, (rows, dead) in zip(itertools.accumulate(map(len, split)), answers, strict=True):
            if done not in points:
                continue
            seen += 1
            sizes = [len(part) for part in split]
            assert sorted(([row[name] for name in names] for row in rows), key=repr) == sorted(points[done]["rows"], key=repr), (sizes, done)
            if "tombstone" in points[done]:
                assert dead == [expected_tombstone(case, points[done]["tombstone"])], (sizes, done)
    assert seen >= 2 ** (len(inputs) - 1)


def test_every_table_of_the_cases_is_run():
    assert len(CASES) == 25 and [case_id for case_id, case in CASES.items() if "expected_error" in case] == ["PU-13"]


def test_partial_update_refuses_deletes_it_was_not_told_about_in_any_split(conn):
    names = declare(conn, CASES["PU-13"])
    conn.execute(FEED)
    for split in splits(CASES["PU-13"]["inputs"]):
        with pytest.raises(Exception, match="public.cases does not accept deletes") as error:
            conn.execute("SELECT * FROM feed(%s)", (json.dumps([batch(names, part) for part in split]),))
        assert error.value.sqlstate == "55000" and error.value.diag.message_hint
        assert conn.execute("SELECT count(*) FROM cases").fetchone() == (0,)
