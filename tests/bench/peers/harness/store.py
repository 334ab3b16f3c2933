"""Samples on disk, one JSON object a line. A unit (round, scenario, variant, contender) counts once it is over, so that an interrupted run goes on where it was."""

import dataclasses
import json
import time


class Store:
    """The folder of one run."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "samples.jsonl"
        self.about = json.loads((folder / "run.json").read_text())
        lines = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        self.ended = {line["unit"]: line for line in lines if line["kind"] == "end"}
        # What an interrupted unit left behind has no end; a unit that was tried again has several, and the last counts.
        self.samples = [line for line in lines if line["kind"] == "sample" and self.ended.get(line["unit"], {}).get("attempt") == line["attempt"]]

    @classmethod
    def create(cls, parent, about):
        folder = parent / time.strftime("%Y%m%d-%H%M%S")
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")
        return cls(folder)

    @classmethod
    def latest_whole(cls, parent):
        """The newest run that left nothing out, finished or not; or None."""
        runs = (cls(path.parent) for path in sorted(parent.glob("*/run.json"), reverse=True))
        return next((run for run in runs if run.about["options"].get("is_whole")), None)

    def is_over(self, unit, retry=False):
        end = self.ended.get(unit)
        return end is not None and not (retry and end.get("error"))

    def add(self, unit, attempt, sample):
        self._write({"kind": "sample", "unit": unit, "attempt": attempt, "at": time.strftime("%Y-%m-%d %H:%M:%S"), **sample})

    def end(self, unit, attempt, seconds, error=None):
        line = {"kind": "end", "unit": unit, "attempt": attempt, "seconds": round(seconds, 1), **({"error": error} if error else {})}
        self.ended[unit] = line
        self._write(line)

    def _write(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def to_go_on_with(parent, options, commit, units, retry):
    """The newest run with these options from this commit that has units left to measure, or None."""
    for path in sorted(parent.glob("*/run.json"), reverse=True):
        run = Store(path.parent)
        if run.about["options"] == json.loads(json.dumps(dataclasses.asdict(options))) and run.about["commit"] == commit:
            return None if all(run.is_over(unit, retry) for unit in units) else run
    return None
