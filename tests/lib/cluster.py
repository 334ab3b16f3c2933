"""Throwaway PostgreSQL servers on the staged copy that scripts/build makes.

    with Cluster() as cluster:                      # pg_stint preloaded, empty, fsync off
        cluster.create_database("app")              # with the extension; extension=False without
        with cluster.connect("app") as conn: ...    # psycopg connection, autocommit
        cluster.crash(); cluster.start()            # immediate shutdown, then recovery
        with cluster.standby() as replica: ...

A server is a child of this process: it is stopped at exit, and by the kernel when this process is killed.
It listens on a Unix socket in a folder of its own (trusted, mode 0700) and on a free port of 127.0.0.1
(password in `cluster.password`).
"""

import atexit
import ctypes
import os
import pathlib
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

import psycopg
import psycopg.conninfo
import psycopg.sql

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUPERUSER = "postgres"

SETTINGS = {
    "synchronous_commit": "on",
    "shared_buffers": "64MB",
    "max_connections": 100,
    "max_worker_processes": 20,
    "max_prepared_transactions": 10,
    "max_wal_senders": 5,
    "wal_level": "replica",
    "hot_standby": "on",
    "timezone": "UTC",
    "lc_messages": "C",
    "log_line_prefix": "%m [%p] %q%b %d ",
    "log_checkpoints": "off",
    "logging_collector": "off",
}

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_bindir = None


def die_with_parent(signum):
    """A preexec_fn: the kernel sends the signal to the child when the thread that starts it ends."""
    return lambda: _libc.prctl(_PR_SET_PDEATHSIG, signum)


class ClusterError(Exception):
    """A server or one of its tools did not do as asked; the text holds its output."""


def bindir():
    """The folder of the staged PostgreSQL programs."""
    global _bindir
    if _bindir is None:
        out = subprocess.run([ROOT / "scripts/stage", "--bindir"], check=True, stdout=subprocess.PIPE, text=True)
        _bindir = pathlib.Path(out.stdout.strip())
    return _bindir


def server_user():
    """Arguments that make subprocess act as a user PostgreSQL accepts: it refuses to run as root."""
    if os.getuid() != 0:
        return {}
    entry = pwd.getpwnam("postgres")
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist("postgres", entry.pw_gid)}


def clean_environment():
    """This process's environment without what would change a server or a client behind the test's back."""
    # RUST_BACKTRACE would put a backtrace into the DETAIL of every error.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PG") and not k.startswith("RUST_")}
    # A locale the machine may not have makes programs warn.
    return env | {"LC_ALL": "C.UTF-8", "PATH": f"{bindir()}{os.pathsep}{os.environ['PATH']}"}


def own(path):
    """Hands a folder to the server's user."""
    os.chmod(path, 0o700)
    if user := server_user():
        os.chown(path, user["user"], user["group"])


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _quoted(value):
    if isinstance(value, bool):
        value = "on" if value else "off"
    return "'" + str(value).replace("'", "''") + "'"


class Cluster:
    """One server with its data directory."""

    def __init__(self, preload=True, config=None, fsync=False, start=True, orphan=False, directory=None):
        """`config` adds settings; `orphan` lets the server outlive this process (scripts/server start)."""
        # Sockets need a short path, so this is not under the scratch folder.
        parent = os.environ.get("STINT_TEST_TMP", "/tmp")
        self.base = pathlib.Path(directory or tempfile.mkdtemp(prefix="stint.", dir=parent))
        if directory:
            self.base.mkdir()
        own(self.base)
        self.data = self.base / "data"
        self.socket_dir = self.base / "s"
        self.log_path = self.base / "log"
        self.password = secrets.token_hex(16)
        self.port = _free_port()
        self.preload = preload
        self.config = {"fsync": fsync, "full_page_writes": fsync} | (config or {})
        self._orphan = orphan
        self._postmaster = None
        self._attached = False
        if not orphan:
            atexit.register(self.destroy)
        if start:
            self._initdb()
            self.start()

    @classmethod
    def attach(cls, base):
        """A server that another process started and owns: for connecting, not for stopping."""
        self = cls.__new__(cls)
        self.base = pathlib.Path(base)
        self.data = self.base / "data"
        self.socket_dir = self.base / "s"
        self.log_path = self.base / "log"
        self.password = (self.base / "password").read_text().strip()
        self.port = int((self.data / "postmaster.pid").read_text().splitlines()[3])
        self._postmaster = None
        self._attached = True
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.destroy()

    # Starting and stopping

    def _initdb(self):
        self._prepare()
        self._tool(
            "initdb", "--no-sync", "--no-instructions", "--encoding=UTF8", "--locale=C.UTF-8",
            f"--username={SUPERUSER}", "--auth-local=trust", "--auth-host=scram-sha-256",
            f"--pwfile={self.base / 'password'}", "-D", self.data,
        )  # fmt: skip
        with open(self.data / "postgresql.conf", "a") as conf:
            conf.write("\ninclude 'test.conf'\n")

    def _prepare(self):
        self.socket_dir.mkdir()
        own(self.socket_dir)
        password = self.base / "password"
        password.write_text(self.password + "\n")
        if user := server_user():
            os.chown(password, user["user"], user["group"])
        password.chmod(0o600)

    def configure(self, **settings):
        """Changes settings; they take effect at the next start, or with `reload`."""
        self.config |= settings
        fixed = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": self.socket_dir}
        preload = {"shared_preload_libraries": "pg_stint"} if self.preload else {}
        lines = (f"{k} = {_quoted(v)}\n" for k, v in (SETTINGS | preload | self.config | fixed).items())
        path = self.data / "test.conf"
        path.write_text("".join(lines))
        path.chmod(0o644)

    def reload(self):
        self.signal_postmaster(signal.SIGHUP)

    def start(self, timeout=60):
        """Starts the server and waits until it answers; a standby, until it answers readers."""
        for attempt in range(5):
            self.configure()
            self._launch()
            if self._wait_ready(timeout):
                return self
            # Between choosing and binding, somebody else may have taken the port.
            if "Address already in use" not in self.log():
                break
            self.port = _free_port()
        raise ClusterError(f"the server did not start:\n{self.log()[-4000:]}")

    def _launch(self):
        # A thread may end long before the process does.
        follow = not self._orphan and threading.current_thread() is threading.main_thread()
        with open(self.log_path, "ab") as log:
            self._postmaster = subprocess.Popen(
                [bindir() / "postgres", "-D", self.data],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.base, env=clean_environment(),
                start_new_session=True, umask=0o077, **server_user(),
                preexec_fn=die_with_parent(signal.SIGINT) if follow else None,
            )  # fmt: skip

    def _wait_ready(self, timeout):
        deadline = time.monotonic() + timeout
        pid_file = self.data / "postmaster.pid"
        while time.monotonic() < deadline:
            if self._postmaster.poll() is not None:
                return False
            try:
                lines = pid_file.read_text().splitlines()
            except FileNotFoundError:
                lines = []
            if len(lines) >= 8 and int(lines[0]) == self._postmaster.pid and lines[7].strip() == "ready":
                return True
            time.sleep(0.02)
        return False

    def wait_ready(self, timeout=30):
        """Waits until the server takes connections, for example after it restarted from a killed backend."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self.connect().close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    @property
    def postmaster_pid(self):
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def signal_postmaster(self, signum):
        os.kill(self.postmaster_pid, signum)

    def running(self):
        return self._postmaster is not None and self._postmaster.poll() is None

    def stop(self, mode="fast", timeout=30):
        """Stops the server (smart, fast or immediate) and returns the seconds it took."""
        assert not self._attached, "an attached server belongs to the process that started it"
        started = time.monotonic()
        if self.running():
            signum = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode]
            self._postmaster.send_signal(signum)
            try:
                self._postmaster.wait(timeout)
            except subprocess.TimeoutExpired:
                self._postmaster.send_signal(signal.SIGQUIT)
                self._postmaster.wait()
                raise ClusterError(f"{mode} shutdown took more than {timeout} s:\n{self.log()[-4000:]}") from None
        return time.monotonic() - started

    def restart(self, mode="fast", **settings):
        self.stop(mode)
        self.configure(**settings)
        return self.start()

    def crash(self):
        """As a power cut looks to the server: no checkpoint, recovery at the next start."""
        self.stop("immediate")

    def destroy(self):
        """Stops the server and removes all of it."""
        if self._attached:
            return
        if self.running():
            self.stop("immediate")
        self.remove()
        atexit.unregister(self.destroy)

    def remove(self):
        shutil.rmtree(self.base, ignore_errors=True)

    def standby(self, **config):
        """A streaming standby of this server, started; `promote` ends its being one."""
        replica = Cluster(self.preload, self.config | config, start=False)
        replica._prepare()
        self._tool(
            "pg_basebackup", "-h", self.socket_dir, "-p", self.port, "-U", SUPERUSER,
            "-D", replica.data, "--write-recovery-conf", "--checkpoint=fast", "--no-sync",
        )  # fmt: skip
        return replica.start()

    def promote(self, timeout=30):
        self.sql("SELECT pg_promote(true, %s)", timeout)

    def wait_for_replay(self, primary, timeout=30):
        """Waits until this standby has replayed what the primary has written so far."""
        target = primary.sql("SELECT pg_current_wal_flush_lsn()")
        self.wait_until(f"SELECT pg_last_wal_replay_lsn() >= '{target}'", timeout=timeout)

    # Talking to it

    def dsn(self, dbname=SUPERUSER, tcp=False):
        """A connection string; over TCP with the password, as a driver without Unix sockets needs it."""
        where = {"host": "127.0.0.1", "password": self.password} if tcp else {"host": str(self.socket_dir)}
        return psycopg.conninfo.make_conninfo(port=self.port, user=SUPERUSER, dbname=dbname, **where)

    def connect(self, dbname=SUPERUSER, autocommit=True, **kwargs):
        return psycopg.connect(self.dsn(dbname), autocommit=autocommit, connect_timeout=10, **kwargs)

    def sql(self, query, *params, dbname=SUPERUSER):
        """Runs one statement in a session of its own; the first column of its first row, or None."""
        with self.connect(dbname) as conn:
            cursor = conn.execute(query, params or None)
            row = cursor.fetchone() if cursor.description else None
            return row[0] if row else None

    def wait_until(self, query, *params, dbname=SUPERUSER, timeout=30):
        """Waits until the query's first value is true; returns the seconds it took.

        It connects anew each second: an otherwise idle postmaster of PostgreSQL 15 can sleep through the restart of a background process that is due,
        until something wakes it, as the clients of a server at work do.
        """
        started = time.monotonic()
        while True:
            with self.connect(dbname) as conn:
                connected = time.monotonic()
                while time.monotonic() - connected < 1:
                    if (row := conn.execute(query, params or None).fetchone()) and row[0]:
                        return time.monotonic() - started
                    if time.monotonic() - started > timeout:
                        raise ClusterError(f"not true after {timeout} s: {query}\n{self.log()[-2000:]}")
                    time.sleep(0.02)

    def create_database(self, name, extension=True):
        with self.connect() as conn:
            conn.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
        if extension:
            self.sql("CREATE EXTENSION pg_stint", dbname=name)

    def drop_database(self, name):
        with self.connect() as conn:
            conn.execute(psycopg.sql.SQL("DROP DATABASE {} WITH (FORCE)").format(psycopg.sql.Identifier(name)))

    def psql(self, script, dbname=SUPERUSER, *options):
        """What psql prints (unaligned, tuples only) for a script; raises with its errors when one fails."""
        command = [bindir() / "psql", "-XAtq", "-v", "ON_ERROR_STOP=1", *options]
        env = clean_environment() | self.env(dbname)
        done = subprocess.run(command, input=script, env=env, capture_output=True, text=True)
        if done.returncode:
            raise ClusterError(done.stderr + done.stdout)
        return done.stdout

    def env(self, dbname=SUPERUSER):
        """The environment that lets any libpq program find this server."""
        return {"PGHOST": str(self.socket_dir), "PGPORT": str(self.port), "PGUSER": SUPERUSER, "PGDATABASE": dbname}

    def log(self):
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _tool(self, program, *args):
        done = subprocess.run(
            [bindir() / program, *map(str, args)], cwd=self.base, env=clean_environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=0o077, **server_user(),
        )  # fmt: skip
        if done.returncode:
            raise ClusterError(f"{program} failed:\n{done.stdout}")
