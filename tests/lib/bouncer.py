"""PgBouncer in transaction mode in front of a throwaway server.

    with Bouncer(server, "app") as pool: conn = pool.connect()
"""

import contextlib
import socket
import subprocess
import time

import psycopg
from cluster import own, server_user

PROGRAM = "/usr/sbin/pgbouncer"


class Bouncer:
    def __init__(self, server, dbname, **settings):
        self.dbname = dbname
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        folder = server.base / f"bouncer{self.port}"
        folder.mkdir()
        own(folder)
        settings = {
            "listen_addr": "127.0.0.1", "listen_port": self.port, "unix_socket_dir": "", "auth_type": "any", "pool_mode": "transaction",
            "max_client_conn": 500, "default_pool_size": 20,
        } | settings  # fmt: skip
        path = folder / "pgbouncer.ini"
        path.write_text(
            f"[databases]\n{dbname} = host={server.socket_dir} port={server.port} user=postgres\n[pgbouncer]\n"
            + "".join(f"{name} = {setting}\n" for name, setting in settings.items())
        )
        path.chmod(0o644)
        self._log = folder / "log"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen([PROGRAM, "-q", path], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, **server_user())
        self._wait_ready()

    def _wait_ready(self):
        deadline = time.monotonic() + 15
        while True:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"pgbouncer did not start: {self._log.read_text()[-1000:]}")
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.terminate()
        self._process.wait()

    def connect(self, autocommit=True):
        # Prepared statements belong to a server's session, and the next transaction may get another one.
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname=self.dbname, autocommit=autocommit, prepare_threshold=None, connect_timeout=10
        )
