"""Fixtures shared by the pytest suites. Run them through tests/run, which builds first."""

import itertools
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))

for _name in [n for n in os.environ if n.startswith("PG") and n != "PG_MAJOR"]:
    del os.environ[_name]

import pytest  # noqa: E402
from cluster import Cluster  # noqa: E402

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server():
    """The server shared by a run. Leave its settings and processes alone: tests that do not take `cluster`."""
    if base := os.environ.get("STINT_TEST_SERVER"):
        yield Cluster.attach(base)
    else:
        with Cluster() as own:
            yield own


@pytest.fixture
def database(server):
    """The name of a fresh database with the extension; stint.check() must be empty when the test ends."""
    name = f"t{os.getpid()}_{next(_numbers)}"
    server.create_database(name)
    yield name
    violations = check(server, name)
    server.drop_database(name)
    assert violations == []


@pytest.fixture
def conn(server, database):
    """A superuser's connection to a fresh database, autocommit."""
    with server.connect(database) as connection:
        yield connection


@pytest.fixture
def connect(server, database):
    """Opens further connections to the same fresh database; all are closed when the test ends."""
    opened = []

    def open_one(**kwargs):
        opened.append(server.connect(database, **kwargs))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.close()


@pytest.fixture
def cluster():
    """Makes servers of the test's own, to crash, restart and configure: cluster(config={...}, preload=False)."""
    made = []

    def make(**kwargs):
        made.append(Cluster(**kwargs))
        return made[-1]

    yield make
    for one in made:
        one.destroy()


def check(server, dbname):
    """The violations that stint.check() finds; none in a database without the extension."""
    with server.connect(dbname) as connection:
        if connection.execute("SELECT to_regprocedure('stint.check()')").fetchone()[0] is None:
            return []
        return connection.execute("SELECT * FROM stint.check()").fetchall()
