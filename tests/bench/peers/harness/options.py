"""What one run measures, and for how long."""

import argparse
import dataclasses
import os

NAMES = "tests/bench/peers/README.md says what each contender and scenario is."


@dataclasses.dataclass(frozen=True)
class Options:
    """All that decides the figures: a run with other options is another run."""

    quick: bool
    is_whole: bool  # neither quick nor only some contenders or scenarios
    contenders: tuple
    scenarios: tuple
    rounds: int
    seconds: float  # of one sample
    backlog: int  # ready tasks while claims are measured
    levels: tuple  # backlogs whose claims are compared
    waiting: int  # scheduled tasks, and tasks held by a budget
    held_tasks: int  # tasks run while a transaction is held open
    held_seconds: float  # at most so long, for contenders that collapse
    held_limit: float  # at most so long for pg_stint, which is meant to get through all of them
    idle_seconds: float
    load_limit: float  # seconds a backlog may take to be loaded
    overhead: float  # about how many seconds a unit takes beside its samples: a database, the floors, settling
    quiet: float  # seconds to wait in all for the machine to be quiet


def full():
    return {
        "rounds": 3,
        "seconds": 4.0,
        "backlog": 200_000,
        "levels": (1_000, 10_000, 100_000, 1_000_000),
        "waiting": 100_000,
        "held_tasks": 600_000,
        "held_seconds": 60.0,
        "held_limit": 420.0,
        "idle_seconds": 8.0,
        "load_limit": 90.0,
        "overhead": 8.0,
        "quiet": 900.0,
    }


def quick():
    return {
        "rounds": 1,
        "seconds": 1.0,
        "backlog": 5_000,
        "levels": (1_000, 5_000),
        "waiting": 2_000,
        "held_tasks": 20_000,
        "held_seconds": 6.0,
        "held_limit": 8.0,
        "idle_seconds": 3.0,
        "load_limit": 15.0,
        "overhead": 3.0,
        "quiet": 0.0,
    }


def parse(all_contenders, all_scenarios):
    """`all_scenarios`: names, and whether a run without a choice takes them; the others are parts of those."""
    parser = argparse.ArgumentParser(
        prog="tests/bench/peers/run",
        description="Measures pg_stint and its peers side by side and writes docs/bench. " + NAMES,
        epilog="make bench passes QUICK=1, ONLY=…, SCENARIOS=…, ROUNDS=… and NEW=1 on.",
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes for each figure: shows that everything runs, not how fast it is")
    parser.add_argument("--only", metavar="NAME,…", help="these contenders: " + ", ".join(all_contenders))
    parser.add_argument(
        "--scenarios",
        metavar="NAME,…",
        help="these scenarios: " + ", ".join(name for name, whole in all_scenarios.items() if whole) + "; or a part, as held/snapshot+plain",
    )
    parser.add_argument("--rounds", type=int, help="how often everything is measured (3; quick: 1)")
    parser.add_argument("--new", action="store_true", help="begin anew instead of going on with an interrupted run")
    parser.add_argument("--retry", action="store_true", help="measure again what failed in the run that is gone on with")
    parser.add_argument("--no-build", action="store_true", help="take pg_stint as it is built already")
    parser.add_argument("--list", action="store_true", help="print what would be measured, and about how long it takes")
    arguments = parser.parse_args()

    def chosen(given, known, what, every):
        names = tuple(name for name in (given or "").split(",") if name)
        for name in names:
            if name not in known:
                parser.error(f'unknown {what} "{name}"; there are {", ".join(known)}')
        return names or every

    values = quick() if arguments.quick else full()
    if arguments.rounds:
        values["rounds"] = arguments.rounds
    if "BENCH_QUIET" in os.environ:
        values["quiet"] = float(os.environ["BENCH_QUIET"])
    options = Options(
        quick=arguments.quick,
        is_whole=not (arguments.quick or arguments.only or arguments.scenarios),
        contenders=chosen(arguments.only, all_contenders, "contender", all_contenders),
        scenarios=chosen(arguments.scenarios, all_scenarios, "scenario", tuple(name for name, whole in all_scenarios.items() if whole)),
        **values,
    )
    return options, arguments
