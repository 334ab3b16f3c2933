"""Medians over the rounds, their spread, and which samples something disturbed."""

import collections
import statistics

from ..options import Options
from ..plan import units

FOREIGN_LIMIT = 0.25  # cores that others used during a sample
STEAL_LIMIT = 0.10  # cores that the hypervisor took


def disturbed(sample):
    return sample.get("foreign_cores", 0) > FOREIGN_LIMIT or sample.get("steal_cores", 0) > STEAL_LIMIT


class Cell:
    """The samples of one figure, one for each round. Disturbed ones are set aside where there are others."""

    def __init__(self, samples):
        self.all = [sample for sample in samples if sample.get("tasks") or sample.get("rate") or "cpu_share" in sample]
        quiet = [sample for sample in self.all if not disturbed(sample)]
        self.samples = quiet or self.all
        self.set_aside = len(self.all) - len(self.samples)
        self.disturbed = bool(self.all) and not quiet

    def __bool__(self):
        return bool(self.samples)

    def values(self, name):
        return [sample[name] for sample in self.samples if sample.get(name) is not None]

    def median(self, name="rate"):
        values = self.values(name)
        return statistics.median(values) if values else None

    def spread(self, name="rate"):
        """Half the distance of the extremes, as a share of the median."""
        values = self.values(name)
        middle = statistics.median(values) if values else 0
        return (max(values) - min(values)) / 2 / middle if len(values) > 1 and middle else None


class Results:
    """All samples of a run, by contender, scenario and point."""

    def __init__(self, store, contenders):
        self.store = store
        self.samples = store.samples
        self.entrants = contenders
        measured = {sample["contender"] for sample in self.samples}
        self.contenders = [contender for contender in contenders.values() if contender.name in measured]
        self.queues = [contender for contender in self.contenders if contender.name != "floor"]

    def rounds(self):
        """How many rounds the figures are of, in words: a run that was ended early has fewer than were asked for."""

        def of_round(names):
            by_round = collections.defaultdict(set)
            for name in names:
                by_round[name.split("/", 1)[0]].add(name)
            return by_round

        planned = of_round(unit for unit, *_ in units(Options(**self.store.about["options"]), self.entrants))
        ended = of_round(self.store.ended)
        whole = sum(planned[turn] <= ended[turn] for turn in list(ended))
        words = f"{whole} round{'' if whole == 1 else 's'}"
        return f"{words} and part of another" if len(ended) > whole else words

    def cell(self, contender, scenario, **point):
        name = contender if isinstance(contender, str) else contender.name
        return Cell(
            [
                sample
                for sample in self.samples
                if sample["contender"] == name
                and sample["scenario"] == scenario
                and all(sample["point"].get(key) == value for key, value in point.items())
                and (point or not sample["point"].get("statement"))
            ]
        )

    def points(self, scenario, key):
        """The values a coordinate takes in a scenario, in the order of measuring."""
        return list(dict.fromkeys(sample["point"][key] for sample in self.samples if sample["scenario"] == scenario and key in sample["point"]))

    def ratio(self, over, under, name="rate"):
        above, below = over.median(name), under.median(name)
        return above / below if above is not None and below else None

    def disturbed_cells(self):
        """Where every sample was disturbed, with the median of what others used."""
        seen = {}
        for sample in self.samples:
            seen.setdefault((sample["contender"], sample["scenario"], str(sample["point"])), []).append(sample)
        return [(*key, statistics.median(one.get("foreign_cores", 0) for one in samples)) for key, samples in seen.items() if all(map(disturbed, samples))]
