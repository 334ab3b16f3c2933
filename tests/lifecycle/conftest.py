"""How the lifecycle tests look at the maintenance worker and its launcher."""

import pytest

WORKER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_stint worker' AND datname = %s"
LAUNCHER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_stint launcher'"


class Processes:
    """The background processes of one server, seen as a DBA sees them."""

    def __init__(self, server):
        self.server = server

    def launcher(self):
        return self.server.sql(LAUNCHER)

    def worker(self, dbname):
        """The pid of a database's worker, or None. More than one is a failure."""
        with self.server.connect() as conn:
            pids = [pid for (pid,) in conn.execute(WORKER, (dbname,))]
        assert len(pids) <= 1
        return pids[0] if pids else None

    def wait_for_worker(self, dbname, other_than=0, timeout=15):
        """Waits for a worker with another pid that has finished a round; returns its pid."""
        query = f"{WORKER} AND pid <> %s AND backend_start <= (SELECT max(last_round) FROM stint.maintenance WHERE database = datname)"
        self.server.wait_until(f"SELECT EXISTS ({query})", dbname, other_than, dbname=dbname, timeout=timeout)
        return self.worker(dbname)

    def wait_for_no_worker(self, dbname, timeout=15):
        return self.server.wait_until(f"SELECT NOT EXISTS ({WORKER})", dbname, timeout=timeout)

    def prove_at_work(self, dbname):
        """A delayed task is promoted by nobody but the worker."""
        with self.server.connect(dbname) as conn:
            queue = f"proof {conn.info.backend_pid}"
            conn.execute("SELECT stint.create_queue(%s)", (queue,))
            conn.execute("SELECT stint.enqueue(%s, '{}', delay => '50 ms')", (queue,))
        self.server.wait_until("SELECT status = 'ready' FROM stint.tasks WHERE queue = %s", queue, dbname=dbname, timeout=15)


@pytest.fixture
def processes(server, database):
    """The shared server with the worker of this test's database at work. Other tests use its launcher: leave that alone."""
    shared = Processes(server)
    shared.wait_for_worker(database)
    return shared


@pytest.fixture
def started(cluster):
    """Makes a server with the extension in the database "app" and its worker at work: (server, processes)."""

    def make(**kwargs):
        server = cluster(**kwargs)
        server.create_database("app")
        processes = Processes(server)
        processes.wait_for_worker("app")
        return server, processes

    return make
