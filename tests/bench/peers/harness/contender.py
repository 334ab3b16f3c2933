"""A contender is a folder under contenders/: contender.toml, and the scripts of what it can do. README.md lists them."""

import json
import re
import shutil
import subprocess
import tomllib

from .drivers import Role
from .places import CONTENDERS, HERE

SETUP_LIMIT = 120


def _version(source):
    """The version that is installed, from where it is pinned: "npm:pg-boss", "pypi:dbos", "crate:pgmq", "debian:postgresql-15-pgq3"."""
    kind, _, name = source.partition(":")
    if kind == "npm":
        return json.loads((HERE / "versions/package.json").read_text())["dependencies"][name]
    if kind == "pypi":
        return re.search(rf"^{name}==(.*)$", (HERE / "versions/requirements.txt").read_text(), re.M)[1]
    if kind == "crate":
        return re.search(rf'^{name} = .*"=(.*?)"', (HERE / f"versions/{name}.toml").read_text(), re.M)[1]
    if kind == "debian":
        return subprocess.run(["dpkg-query", "-W", "-f=${Version}", name], stdout=subprocess.PIPE, text=True).stdout
    return source


class Contender:
    def __init__(self, name):
        self.name = name
        self.folder = CONTENDERS / name
        about = tomllib.loads((self.folder / "contender.toml").read_text())
        self.title = about["title"]
        self.version_source = about.get("version", "")
        self.note = about.get("note", "")
        self.history = about.get("history", "")
        # "sql": its statements run in qbench; "own": it has a client of its own, `run`, since its SQL or its store is no public interface
        self.driver = about.get("driver", "sql")
        self.own_scenarios = about.get("scenarios", [])
        self.unnamed = about.get("unnamed_statements", False)  # the product's client does not prepare
        self.template = about.get("template", True)  # whether its database may be made by copying one
        self.channel = about.get("channel")
        self.notifies_by_default = about.get("notifies_by_default", False)
        self.poll_ms = about.get("poll_ms", 1000)
        self.payload_column = about.get("payload_column")
        self.batch_clients = about.get("batch_clients", 4)
        self.batch_size = about.get("batch_size", 100)
        self.recorded = None  # set by the bench: the folder for what the product's own client sends
        self.database = "bench_" + re.sub(r"\W", "_", name)

    @property
    def version(self):
        return _version(self.version_source)

    def file(self, name):
        """A script's path: the contender's own, or one that its `record` made; None where it has no such script."""
        for folder in (self.folder, self.recorded):
            if folder and (folder / name).exists():
                return folder / name
        return None

    def record_statements(self, server, peers):
        """Has the product's own client send one of everything, and makes scripts of what it sent; once for each version of the client and of what records."""
        source = self.folder / "record.mjs"
        if not source.exists():
            return
        text = (HERE / "driver/record.mjs").read_text() + source.read_text() + self.version
        if (self.recorded / "from").exists() and (self.recorded / "from").read_text() == text:
            return
        shutil.rmtree(self.recorded, ignore_errors=True)
        self.recorded.mkdir(parents=True)
        shutil.copy(HERE / "driver/record.mjs", peers / "node/record.mjs")
        shutil.copy(source, peers / f"node/{self.name}.mjs")
        database = self.database + "_record"
        server.create(database)
        environment = {"PEERS": str(peers), "RECORDED": str(self.recorded)}
        self._fill(server, database, environment)
        node = peers / "node/node_modules/.bin/node"
        done = subprocess.run(
            [node, peers / f"node/{self.name}.mjs"],
            env=server.environment(database) | environment,
            timeout=SETUP_LIMIT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}'s statements could not be recorded:\n{done.stdout[-3000:]}")
        server.drop(database)
        (self.recorded / "from").write_text(text)

    def can(self, *names):
        return self.driver == "sql" and all(self.file(name) for name in names)

    # Databases

    def _fill(self, server, database, environment):
        if (self.folder / "setup").exists():
            subprocess.run([self.folder / "setup"], check=True, timeout=SETUP_LIMIT, env=server.environment(database) | environment, stdout=subprocess.DEVNULL)
        if (self.folder / "setup.sql").exists():
            server.script(self.folder / "setup.sql", database)

    def fresh(self, server, environment):
        """An empty database with the product in it."""
        if not self.template:
            server.create(self.database)
            self._fill(server, self.database, environment)
            return
        template = self.database + "_template"
        if template not in server.databases():
            try:
                server.create(template)
                self._fill(server, template, environment)
            except BaseException:
                server.drop(template)
                raise
        server.create(self.database, template)

    # Roles for qbench

    def claimers(self, clients, **options):
        return Role("cons", self.file("claim.sql"), clients, options)

    def batch_claimers(self, **options):
        return Role("cons", self.file("claim_batch.sql"), self.batch_clients, {"per": self.batch_size} | options)

    def producer(self, feed):
        """Keeps so many tasks in the queue."""
        return Role(
            "prod", self.file("enqueue_many.sql"), 1, {"per": 1000, "feed": feed, "init": self.file("enqueue_many_init.sql") or HERE / "driver/payloads.sql"}
        )

    def loaders(self, clients=2, script="enqueue_many.sql"):
        """Consumers to qbench, so that it stops after a number of tasks."""
        return Role("load", self.file(script), clients, {"per": 1000, "init": self.file("enqueue_many_init.sql") or HERE / "driver/payloads.sql"})


def every():
    """All contenders, in the order of the report."""
    names = [line.strip() for line in (CONTENDERS / "order").read_text().splitlines() if line.strip()]
    return {name: Contender(name) for name in names}
