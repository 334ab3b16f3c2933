"""What a run measures, in which order."""

from . import scenarios


def units(chosen, entrants):
    """All units in the order in which they run: rounds far apart, and within a round all contenders of a scenario side by side."""
    for turn in range(1, chosen.rounds + 1):
        for name, module in scenarios.ALL.items():
            for variant in module.variants(chosen):
                if name not in chosen.scenarios and f"{name}/{variant}" not in chosen.scenarios:
                    continue
                for entrant in entrants.values():
                    # A part beyond the first works for all as it does for two.
                    if chosen.quick and variant != module.variants(chosen)[0] and entrant.name not in ("pg_stint", "hand"):
                        continue
                    if turn > getattr(module, "rounds", lambda options, *_: options.rounds)(chosen, entrant, variant):
                        continue
                    if entrant.name in chosen.contenders and module.runs(entrant, variant):
                        yield f"{turn}/{name}/{variant}/{entrant.name}", module, variant, entrant
