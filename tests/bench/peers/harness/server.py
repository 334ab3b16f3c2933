"""The one server on which all SQL contenders run, with one configuration, and a PgBouncer before it."""

import os
import pathlib
import socket
import subprocess
import time

from . import machine
from .places import HERE, Cluster, bindir, clean_environment, own, server_user


def settings():
    """The lines of postgresql.conf beside this package."""
    lines = (line.partition("#")[0].strip() for line in (HERE / "postgresql.conf").read_text().splitlines())
    pairs = (line.partition("=") for line in lines if line)
    return {name.strip(): value.strip().strip("'") for name, _, value in pairs}


def _parent(scratch):
    """A folder on a real disk, with a path short enough for sockets: /tmp, or the scratch folder where /tmp is memory."""
    in_memory = machine.filesystem("/tmp").startswith("tmpfs")
    return os.environ.get("BENCH_DATA") or (str(scratch) if in_memory and len(str(scratch)) < 60 else "/tmp")


class Server:
    def __init__(self, scratch):
        os.environ["STINT_TEST_TMP"] = _parent(scratch)
        config = settings()
        # The library of pg_stint is in all backends, as in a server that has it; the other contenders use nothing of it.
        self.cluster = Cluster(preload=False, fsync=True, config=config)
        self.bouncer = None

    @property
    def pid(self):
        return self.cluster.postmaster_pid

    def revive(self):
        """After a crash that a unit caused, so that the next ones are measured all the same."""
        if not self.cluster.running():
            self.cluster.start()
        self.cluster.wait_ready()

    def version(self):
        return self.cluster.sql("SHOW server_version")

    def tool(self, name):
        return str(bindir() / name)

    def flush_rate(self):
        """fdatasync calls a second in the data directory; as the server's user, who owns it."""
        return machine.flush_rate(self.tool("pg_test_fsync"), str(self.cluster.base / "fsync"))

    def databases(self):
        with self.cluster.connect() as conn:
            return {name for (name,) in conn.execute("SELECT datname FROM pg_database")}

    def drop(self, name):
        with self.cluster.connect() as conn:
            conn.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def create(self, name, template=None):
        self.drop(name)
        with self.cluster.connect() as conn:
            conn.execute(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}"' if template else ""))

    def script(self, path, dbname, **variables):
        """Runs a SQL file in psql."""
        options = [word for name, value in variables.items() for word in ("-v", f"{name}={value}")]
        return self.cluster.psql(pathlib.Path(path).read_text(), dbname, *options)

    def environment(self, dbname):
        """How the products' own clients find the server: libpq's variables, and a URL for those that take only that, over TCP."""
        url = f"postgresql://postgres:{self.cluster.password}@127.0.0.1:{self.cluster.port}/{dbname}"
        return clean_environment() | self.cluster.env(dbname) | {"DATABASE_URL": url}

    def pin(self, cores):
        """Binds the server and the backends it starts from now on to these cores; returns what to call to undo that."""
        before = os.sched_getaffinity(self.pid)
        os.sched_setaffinity(self.pid, cores)
        return lambda: os.sched_setaffinity(self.pid, before)

    def bouncer_dsn(self, dbname):
        """A connection string through PgBouncer in transaction mode, which is started when first asked for."""
        if self.bouncer is None or self.bouncer.database != dbname:
            self.stop_bouncer()
            self.bouncer = Bouncer(self.cluster, dbname)
        return f"host=127.0.0.1 port={self.bouncer.port} user=postgres dbname={dbname}"

    def stop_bouncer(self):
        if self.bouncer:
            self.bouncer.stop()
            self.bouncer = None

    def helpers(self):
        """Processes of the bench beside the server."""
        return [self.bouncer.process.pid] if self.bouncer else []

    def destroy(self):
        self.stop_bouncer()
        self.cluster.destroy()


class Bouncer:
    def __init__(self, cluster, database):
        self.database = database
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        folder = cluster.base / "bouncer"
        folder.mkdir(exist_ok=True)
        own(folder)
        path = folder / "pgbouncer.ini"
        path.write_text(
            f"[databases]\n{database} = host={cluster.socket_dir} port={cluster.port} user=postgres\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n"
            "max_client_conn = 500\ndefault_pool_size = 100\nlog_connections = 0\nlog_disconnections = 0\n"
        )
        path.chmod(0o644)
        with open(folder / "log", "ab") as log:
            self.process = subprocess.Popen(["/usr/sbin/pgbouncer", "-q", path], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, **server_user())
        deadline = time.monotonic() + 10
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"pgbouncer did not start: {(folder / 'log').read_text()[-500:]}") from None
                time.sleep(0.05)

    def stop(self):
        self.process.terminate()
        self.process.wait()
