"""The changelogs of Apache Paimon's cases: one transaction for each of their batches, however it is cut into calls."""

import itertools
import json

import pytest
from test_paimon_cases import CASES, batch, declare

WITH_CHANGELOG = [name for name, case in CASES.items() if "expected_changelog" in case]


def expected(case):
    """What Paimon emits with changelog-producer.row-deduplicate: an update that changes nothing is no change."""
    return case.get("expected_changelog_if_option_true", case["expected_changelog"])


def one_by_one(events):
    return [[event] for event in events]


def together(events):
    return [events]


@pytest.mark.parametrize("reader", ["changes", "poll"])
@pytest.mark.parametrize("how", [one_by_one, together])
@pytest.mark.parametrize("name", WITH_CHANGELOG)
def test_a_paimon_case_gives_its_changelog_however_its_transactions_are_cut(conn, name, how, reader):
    case = CASES[name]
    names = declare(conn, case)
    conn.execute("SELECT stint.create_consumer('c', '{cases}')")
    read = {
        "changes": "SELECT kind, before, after FROM stint.changes('cases', %s)",
        "poll": "SELECT kind, before, after FROM stint.poll('c', greatest(%s, 100))",
    }[reader]
    position = 0
    for number, events in itertools.groupby(case["inputs"], key=lambda event: event["batch"]):
        with conn.transaction():
            for rows in how(list(events)):
                conn.execute("SELECT * FROM stint.merge('cases', %s)", (json.dumps(batch(names, rows)),))
        end = conn.execute("SELECT stint.tick()").fetchone()[0]
        with conn.transaction():
            found = conn.execute(read, (position,)).fetchall()
            conn.execute("SELECT stint.commit('c', %s)", (end,))
        position = end
        got = [(kind, [(before if kind in ("-U", "-D") else after)[column] for column in names]) for kind, before, after in found]
        # Paimon orders the keys of one file, not those of a batch.
        per_key = lambda rows: sorted(rows, key=lambda row: json.dumps([row[1][names.index(column)] for column in case["key"]]))  # noqa: E731
        assert per_key(got) == per_key([(change["kind"], change["row"]) for change in expected(case) if change["batch"] == number]), number


def test_every_changelog_of_the_cases_is_compared():
    assert {"AG-05", "AG-06", "FR-01", "DD-02", "DD-03", "PU-10", "PU-11"} == set(WITH_CHANGELOG)
