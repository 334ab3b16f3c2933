"""What the machine is, and what runs on it: CPU time by whom, and whether anything else disturbed a sample."""

import os
import pathlib
import platform
import re
import resource
import subprocess
import time

TICKS = os.sysconf("SC_CLK_TCK")


def _processes():
    """Parent and CPU ticks of each process: its own, and those of children it has waited for."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = pathlib.Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            found[int(entry)] = (int(fields[1]), sum(map(int, fields[11:15])))
    return found


def tree_seconds(*roots):
    """CPU seconds of processes with all their descendants, living or waited for."""
    if not roots:
        return 0.0
    processes = _processes()
    children = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    total, left = 0, list(roots)
    while left:
        pid = left.pop()
        total += processes.get(pid, (0, 0))[1]
        left += children.get(pid, [])
    return total / TICKS


def own_seconds():
    """CPU seconds of the bench itself and the drivers it ran."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def all_seconds():
    """CPU seconds of everything, and what the hypervisor took."""
    user, nice, system, _, _, irq, softirq, steal, *_ = (int(field) for field in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / TICKS, steal / TICKS


class Watch:
    """From its making to `stop`: CPU of the processes that are measured, and of everybody else on the machine. `beside` are processes that belong to the bench and
    are not waited for before `stop`."""

    def __init__(self, *roots, beside=()):
        self.roots, self.beside = roots, beside
        self.began = time.monotonic()
        self.before = self._now()

    def _now(self):
        return tree_seconds(*self.roots), tree_seconds(*self.beside) + own_seconds(), *all_seconds()

    def stop(self):
        elapsed = time.monotonic() - self.began
        measured, own, busy, steal = (after - before for before, after in zip(self.before, self._now(), strict=True))
        return {"cpu_s": measured, "foreign_cores": max(0.0, busy - measured - own) / elapsed, "steal_cores": steal / elapsed, "watched_s": elapsed}


def filesystem(path):
    """Type and device of the file system that holds a path."""
    best = ("", "?", "?")
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        device, mount, kind, *_ = line.split()
        if str(path).startswith(mount) and len(mount) >= len(best[0]):
            best = (mount, kind, device)
    return f"{best[1]} on {best[2]}"


def describe(path):
    """The machine as the report names it."""
    cpu = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    memory = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]) // 1024 // 1024
    release = re.search(r'PRETTY_NAME="(.*)"', pathlib.Path("/etc/os-release").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "kernel": platform.release(),
        "system": release[1] if release else platform.system(),
        "data_on": filesystem(path),
    }


def flush_rate(tool, path, seconds=2):
    """fdatasync calls a second on the disk of the data, by pg_test_fsync."""
    done = subprocess.run([tool, "-s", str(seconds), "-f", path], stdout=subprocess.PIPE, text=True, timeout=60 * seconds)
    found = re.search(r"fdatasync\s+([\d.]+) ops/sec", done.stdout)
    return float(found[1]) if found else None
