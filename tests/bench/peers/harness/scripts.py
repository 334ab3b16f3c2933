"""The scripts of qbench, as Python needs them: their statements, and literals for their variables."""

import re

# Strings and casts are passed by, as qbench does.
_TOKENS = re.compile(r"'(?:[^']|'')*'|::|:([A-Za-z_]\w*)")


def statements(path):
    """The statements of a script, without comments and \\set."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith(("--", "\\set")))
    return [part.strip().rstrip(";") for part in re.split(r"\\gset|;\s*$|;\s*\n", text) if part.strip().rstrip(";")]


def filled(statement, value_of):
    """The statement with a literal for each variable: what `value_of` its name gives."""

    def literal(found):
        return "'" + str(value_of(found[1])).replace("'", "''") + "'" if found[1] else found[0]

    return _TOKENS.sub(literal, statement)
