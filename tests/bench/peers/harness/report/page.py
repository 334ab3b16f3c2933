def write(finished, entrants, target):
    pass
