"""The two programs that make load: qbench (driver/qbench.c) and, as a cross-check, pgbench."""

import dataclasses
import json
import pathlib
import re
import subprocess
import tempfile

PAYLOAD = json.dumps({"t": 0, "pad": "x" * 265})


class DriverError(Exception):
    """A driver ended with an error; the text is what it said."""


@dataclasses.dataclass
class Role:
    """Clients of qbench that run one script; options are named as there."""

    name: str
    script: object  # a path; None only listens
    clients: int
    options: dict = dataclasses.field(default_factory=dict)

    def argument(self):
        options = ",".join(f"{name}={value}" for name, value in self.options.items() if value is not None)
        return f"{self.name}:{self.script or '-'}:{self.clients}" + (f":{options}" if options else "")


class Qbench:
    """One run of qbench, in the background until `result` is asked for."""

    def __init__(self, program, dsn, roles, seconds, tasks=0, backlog=0, interval_ms=0, unnamed=False, pooler=None, prefix=(), environment=None):
        command = [
            *prefix,
            str(program),
            "-d",
            dsn,
            "-T",
            str(seconds),
            "-n",
            str(tasks),
            "-b",
            str(backlog),
            "-i",
            str(interval_ms),
            *(["-x"] if unnamed else []),
            *(["-p", pooler] if pooler else []),
            *(role.argument() for role in roles),
        ]
        self.most = seconds + 120
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def running(self):
        return self.process.poll() is None

    def result(self):
        try:
            out, err = self.process.communicate(timeout=self.most)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise DriverError(f"qbench did not end within {self.most:.0f} s") from None
        if self.process.returncode:
            raise DriverError(f"qbench: {err.strip()[:500]}")
        return json.loads(out)

    def stop(self):
        if self.running():
            self.process.kill()
            self.process.communicate()


def figures(result, role="cons", statement="statement0"):
    """One role's tasks, rate, percentiles of a statement and of the whole iteration, in microseconds."""
    found = result[role]
    first = found["latency"].get(statement, {})
    last = found["latency"].get("statement1", {})
    whole = found["latency"].get("iteration", {})
    kept = {"tasks": found["tasks"], "rate": found["rate"], "empty": found["empty"], "errors": found["errors"], "elapsed": result["elapsed"]}
    for name, source in ("", first), ("second_", last), ("iteration_", whole):
        if source:
            kept |= {f"{name}p50_us": source["p50_us"], f"{name}p99_us": source["p99_us"], f"{name}avg_us": source["avg_us"]}
    if found["error"]:
        kept["driver_error"] = found["error"]
    return kept


def pgbench(program, environment, script, clients, seconds):
    """The same script in pgbench: rate and percentiles, to check qbench by."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            program,
            "-n",
            "-M",
            "prepared",
            "-c",
            str(clients),
            "-j",
            str(min(2, clients)),
            "-T",
            str(max(1, round(seconds))),
            "-f",
            str(script),
            "-D",
            f"payload={PAYLOAD}",
            "-l",
            f"--log-prefix={folder}/log",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + 120)
        if done.returncode:
            raise DriverError(f"pgbench: {done.stderr.strip()[-500:]}")
        logs = [path.read_text() for path in pathlib.Path(folder).glob("log*")]
        took = sorted(int(line.split()[2]) for log in logs for line in log.splitlines())
        rate = float(re.search(r"tps = ([\d.]+)", done.stdout)[1])
    return {"tasks": len(took), "rate": rate, "p50_us": took[len(took) // 2], "p99_us": took[int(len(took) * 0.99)]}
