"""The bench's own arithmetic and bookkeeping. It measures nothing."""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))
from harness import contender, options, scripts, store  # noqa: E402
from harness.report import goals, summary, tables  # noqa: E402
from harness.report.stats import Cell, Results  # noqa: E402


def sample(rate, foreign=0.0, **more):
    return {"contender": "pg_stint", "scenario": "claim", "point": {}, "tasks": 10, "rate": rate, "foreign_cores": foreign, "steal_cores": 0.0} | more


def test_variables_are_filled_in_and_strings_and_casts_are_passed_by():
    statement = """select :id::uuid, ':id', 'it''s :id', '{"a":null}'::jsonb, :payload"""
    filled = scripts.filled(statement, {"id": 7, "payload": "it's"}.__getitem__)
    assert filled == """select '7'::uuid, ':id', 'it''s :id', '{"a":null}'::jsonb, 'it''s'"""


def test_the_statements_of_a_script_end_at_gset_and_at_semicolons(tmp_path):
    path = tmp_path / "claim.sql"
    path.write_text("-- a comment; with one\n\\set k random(1, 9)\nselect a,\n  b from c \\gset\nselect d;\nselect e;\n")
    assert [" ".join(one.split()) for one in scripts.statements(path)] == ["select a, b from c", "select d", "select e"]


def test_what_an_interrupted_unit_left_behind_does_not_count(tmp_path):
    run = store.Store.create(tmp_path, {"options": {}})
    run.add("1/claim//hand", "a", sample(1))
    run.end("1/claim//hand", "a", 1.0)
    run.add("1/claim//pgmq", "b", sample(2))
    again = store.Store(run.folder)
    assert [one["rate"] for one in again.samples] == [1]
    assert again.is_over("1/claim//hand") and not again.is_over("1/claim//pgmq")


def test_a_unit_that_failed_and_was_tried_again_counts_as_the_second_time(tmp_path):
    run = store.Store.create(tmp_path, {"options": {}})
    run.add("1/claim//hand", "a", sample(1))
    run.end("1/claim//hand", "a", 1.0, error="it broke")
    assert run.is_over("1/claim//hand") and not run.is_over("1/claim//hand", retry=True)
    run.add("1/claim//hand", "b", sample(2))
    run.end("1/claim//hand", "b", 1.0)
    again = store.Store(run.folder)
    assert [one["rate"] for one in again.samples] == [2]
    assert again.is_over("1/claim//hand", retry=True)


def test_disturbed_samples_are_set_aside_where_there_are_others_and_marked_where_there_are_none():
    some = Cell([sample(100), sample(10, foreign=1.5), sample(110)])
    assert (some.median(), some.set_aside, some.disturbed) == (105, 1, False)
    none = Cell([sample(10, foreign=1.5), sample(30, foreign=0.5)])
    assert (none.median(), none.set_aside, none.disturbed) == (20, 0, True)
    assert tables.rate(none) == "20†" and tables.rate(some) == "105"


def test_the_spread_is_half_the_distance_of_the_extremes():
    assert Cell([sample(90), sample(100), sample(110)]).spread() == 0.1
    assert Cell([sample(90)]).spread() is None


def test_a_run_that_was_ended_early_says_of_how_many_rounds_it_is(tmp_path):
    chosen = options.Options(quick=False, is_whole=False, contenders=("pg_stint", "hand"), scenarios=("enqueue",), **options.full() | {"rounds": 2})
    run = store.Store.create(tmp_path, {"options": dataclasses.asdict(chosen)})
    said = []
    for unit in ("1/enqueue//pg_stint", "1/enqueue//hand", "2/enqueue//pg_stint", "2/enqueue//hand"):
        run.end(unit, "a", 1.0)
        said.append(Results(store.Store(run.folder), contender.every()).rounds())
    assert said == ["0 rounds and part of another", "1 round", "1 round and part of another", "2 rounds"]


def test_goals_are_met_or_not_and_what_was_not_measured_is_not_claimed(tmp_path):
    run = store.Store.create(tmp_path, {"options": {"held_tasks": 10, "rounds": 1}, "machine": {"cores": 2}, "postgres": "15"})
    for number, share in enumerate((0.36, 0.40, 0.34)):
        run.add(f"{number}/claim//pg_stint", "a", sample(1000, of_floor=share))
        run.end(f"{number}/claim//pg_stint", "a", 1.0)
    results = Results(store.Store(run.folder), contender.every())
    assert goals.table(results).splitlines()[2:] == ["| one by one, 8 clients, of half the bare insert+commit rate (two commits) | ≥ 0.7 | 0.72 | yes |"]
    assert "| pg_stint | – | 1,000 | – |" in summary.table(results)


def test_the_order_names_every_contender_and_each_has_a_version_that_is_pinned():
    folders = {path.parent.name for path in contender.CONTENDERS.glob("*/contender.toml")}
    assert folders == set(contender.every())
    for one in contender.every().values():
        if not one.version_source.startswith("debian:"):  # not on a machine that only runs the tests
            assert one.version or not one.version_source, one.name
        assert (one.folder / "run").exists() == (one.driver == "own"), one.name
