#!/usr/bin/python3
"""Read one Debian copyright document: which licences does it name, and who holds the copyright?

Two kinds of document exist. *Machine-readable* ones (DEP-5, they carry a `Format:` field or at least a
`Files:` field with its `License:`) are read field by field. All others are prose; there we trust, in this
order, references to /usr/share/common-licenses, and sentences that only one licence contains.

Both worker programs use this one parser: a task may be done twice, by workers of either language, and
must come out the same.

    licences.py FILE          the findings as JSON
    licences.py --row FILE    one line for a shell: confidence, input tokens, output tokens, JSON (tab-separated)
"""

import json
import os
import re
import sys

CHARS_PER_TOKEN = 4  # the usual rule of thumb; lengths are counted on the real text

# --- Names -----------------------------------------------------------------------------------------------

# One licence under several spellings becomes one name; the left side is compared in lower case.
SPELLINGS = {
    "mit": "Expat", "mit/x11": "Expat", "mit/expat": "Expat", "expat/mit": "Expat", "mit-expat": "Expat",
    "x11": "X11", "isc": "ISC", "zlib": "Zlib", "zlib/libpng": "Zlib", "curl": "curl", "ftl": "FTL",
    "pd": "public-domain", "public domain": "public-domain", "public-domain": "public-domain",
    "bsl": "BSL-1.0", "boost-1.0": "BSL-1.0", "apache": "Apache", "apache-2": "Apache-2.0", "asl-2.0": "Apache-2.0",
    "mpl-2": "MPL-2.0", "cc0": "CC0-1.0", "psf": "Python", "psf-2": "Python", "openssl": "OpenSSL",
    "bsd-2": "BSD-2-clause", "bsd-3": "BSD-3-clause", "bsd-4": "BSD-4-clause", "fsf-permissive": "FSFAP",
    "expat": "Expat", "boost": "BSL-1.0", "bsd2": "BSD-2-clause", "bsd3": "BSD-3-clause",
    "artistic-1.0": "Artistic", "artistic-1": "Artistic",
}


def canonical(name):
    """One spelling for one licence, or None if the words do not look like a licence's short name.

    The exception of "GPL-2+ with Autoconf exception" is left out: the licence is GPL-2+.
    """
    name = re.split(r"(?:\s|~|-)with(?:\s|~|-)|\s+\(|\s+except", name.strip(), flags=re.I)[0]
    name = name.strip(" \t.,;:()[]\"'`")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+/_~-]*(?: [A-Za-z0-9][A-Za-z0-9.+-]*)?", name) or len(name) > 40:
        return None
    lower = name.lower()
    if lower in SPELLINGS:
        return SPELLINGS[lower]
    gnu = re.fullmatch(r"(?:gnu[ -])?(a|l)?(gpl|fdl|gfdl)[ -]?v?\.?([\d.]+)?(\+|-only|-or-later)?", lower)
    if gnu:
        prefix, family, version, later = gnu.groups()
        family = {"gpl": "GPL", "fdl": "GFDL", "gfdl": "GFDL"}[family]
        # .0 says nothing, except where 2.0 and 2.1 both exist and people still write plain 2
        version = re.sub(r"\.0+$", "", (version or "").strip("."))
        plus = "+" if later in ("+", "-or-later") else ""
        return (prefix or "").upper() + family + (f"-{version}{plus}" if version else "")
    bsd = re.fullmatch(r"bsd[ -]?([234])-?clauses?(-.*)?", lower)
    if bsd:
        return f"BSD-{bsd[1]}-clause{bsd[2] or ''}"
    mozilla = re.fullmatch(r"(mpl|epl|cddl|apache|asl|ofl|sil-ofl|afl)[ -]?v?([\d.]+)", lower)
    if mozilla:
        family = {"apache": "Apache", "asl": "Apache", "sil-ofl": "OFL"}.get(mozilla[1], mozilla[1].upper())
        return f"{family}-{mozilla[2] if '.' in mozilla[2] else mozilla[2] + '.0'}"
    if " " in name and not re.search(r"bsd|style|like|licen[sc]e", lower):
        return None
    return name


def names_in(synopsis):
    """The licences of a DEP-5 synopsis such as "GPL-2+ or Artistic, and BSD-3-clause"."""
    parts = re.split(r"\s*(?:,|;|\||&|\b(?:and/or|and|or)\b|_(?:and|or)_)\s*", synopsis, flags=re.I)
    names = [canonical(part) for part in parts if part]
    # A part that cannot be a name means that a sentence stands where the name should: "without any warranty".
    return names if all(names) else []


# --- Recognising the texts themselves --------------------------------------------------------------------


def plain(text):
    """Lower case, without comment signs and line ends, so that a sentence is one string."""
    return re.sub(r"[\s*#|>]+", " ", text.lower()).replace("’", "'")


VERSION = r"(?:,? ?\(?(?:either )?(?:version|v\.?) ?(\d(?:\.\d)?)(?: of the licen[sc]e)?)"
LATER = r"(?:,?\)? ?(?:\(?or,? ?\(?(?:at your option\)?,? )?(?:any )?(?:later|newer)|\+))"
GNU = re.compile(
    r"gnu (affero |lesser |library |library or lesser |library/lesser |free )?(?:general public|documentation) licen[sc]e"
    r"(?: \(?(?:l?gpl|gfdl)\)?)?"
    r"(?: as published by the free software foundation)?[,;]?" + VERSION + r"?" + f"({LATER})?"
)
COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z][A-Za-z0-9]*(?:-[0-9](?:\.[0-9])?)?)")

# Sentences that one licence has and no other. The BSD family and the X11/Expat pair are told apart below.
SENTENCES = [
    ("Apache-2.0", r"apache licen[sc]e,? (?:version|v\.?) ?2"),
    ("Apache-2.0", r"www\.apache\.org/licenses/license-2\.0"),
    ("MPL-1.1", r"mozilla public licen[sc]e,? (?:version|v\.?) ?1\.1"),
    ("MPL-2.0", r"mozilla public licen[sc]e,? (?:version|v\.?) ?2"),
    ("BSL-1.0", r"boost software licen[sc]e"),
    ("OFL-1.1", r"sil open font licen[sc]e"),
    ("CC0-1.0", r"cc0 1\.0 universal"),
    ("Python", r"python software foundation licen[sc]e"),
    ("OpenSSL", r"developed by the openssl project for use in the openssl toolkit"),
    ("OpenLDAP-2.8", r"the openldap public licen[sc]e version 2\.8"),
    ("Artistic", r"the (?:perl )?[\"“`']*artistic licen[sc]e"),
    ("Artistic", r"same terms as perl(?: itself)?"),
    ("GPL-1+", r"same terms as perl(?: itself)?"),
    ("Info-ZIP", r"of the info-zip licen[sc]e"),
    ("ISC", r"permission to use, copy, modify,? and(?:/or)? distribute this software for any purpose "
            r"with or without fee is hereby granted"),
    ("Zlib", r"altered source versions must be plainly marked as such"),
    ("NTP", r"permission to use, copy, modify,?(?: and)? distribute(?:, and sell)? this software and its documentation "
            r"for any purpose(?: and)?(?: is hereby granted)? without fee"),
    ("FSFAP", r"copying and distribution of this file, with or without modification, are permitted in any medium"),
    ("TCL", r"the authors hereby grant permission to use, copy, modify, distribute, and license this software"),
    ("public-domain", r"(?:(?:is|are|been|be|placed|put|released|donated|dedicated)(?: all)?(?: hereby)?"
                      r"(?: released| placed| put)? (?:in|into|to) the|is|are) public domain"),
]
SENTENCES = [(name, re.compile(pattern)) for name, pattern in SENTENCES]
BSD_START = "redistribution and use in source and binary forms"
EXPAT_START = "permission is hereby granted, free of charge, to any person obtaining a copy"


def pieces(text, start, reach=2600):
    """Each stretch that begins with `start`, up to the next one: documents repeat texts with variations."""
    at = text.find(start)
    while at >= 0:
        following = text.find(start, at + 1)
        yield text[at:min(following if following >= 0 else len(text), at + reach)]
        at = following


def recognise(text):
    """Licences recognised from their own wording; `text` is raw. Order of appearance does not matter."""
    text, found = plain(text), set()
    for match in GNU.finditer(text):
        kind, version, later = (match[1] or "").strip(), match[2], match[3]
        family = {"": "GPL", "affero": "AGPL", "free": "GFDL"}.get(kind, "LGPL")
        if version:
            found.add(f"{family}-{re.sub(r'[.]0$', '', version)}{'+' if later else ''}")
    for name, pattern in SENTENCES:
        if pattern.search(text):
            found.add(name)
    for piece in pieces(text, BSD_START):
        if "all advertising materials mentioning features" in piece:
            found.add("BSD-4-clause")
        elif re.search(r"neither the (?:name|copyright)|the names? of .{0,80} may not be used|may not be used to endorse", piece):
            found.add("BSD-3-clause")
        elif "redistributions" in piece:
            found.add("BSD-2-clause")
    for piece in pieces(text, EXPAT_START):
        found.add("X11" if "except as contained in this notice, the name" in piece else "Expat")
    return found


def referred(text):
    """Licences referred to by their file in /usr/share/common-licenses."""
    names = {canonical(match[1]) for match in COMMON.finditer(text)}
    return {"BSD-3-clause" if name == "BSD" else name for name in names if name}


def without_weaker(names):
    """Drop what a more exact name says already: GPL beside GPL-2+, GPL-2 beside GPL-2+."""
    def weaker(name):
        if name + "+" in names:
            return True
        return any(other != name and re.fullmatch(re.escape(name) + r"-[\d.]+\+?", other) for other in names)
    return {name for name in names if not weaker(name)}


# --- Copyright holders -----------------------------------------------------------------------------------

YEAR = r"(?:19[5-9]\d|20\d\d)"
SIGN = r"(?:\(c\)|©|&copy;|\\\(co)"
YEARS = re.compile(
    rf"(?:^|[\s,(-])(?:{YEAR}|\d\d(?=[\s,-]))"
    rf"(?:\s*(?:-|–|—|/|to|,|&|and)\s*(?:{YEAR}\+?|\d\d?\b|present|now|date))*\+?", re.I)
FLOURISH = re.compile(
    r"(?:all|some) rights\b.*|\b(?:and )?licensed\b.*|\bsee .*|\bthe software is provided.*|\(and is .*"
    r"|^portions?\b[\s,]*", re.I)
NOT_A_HOLDER = re.compile(
    r"(?:notices?|holders?|owners?|and|law|laws|statements?|licen[sc]es?|information|year|years|in|is|or|the above|of|"
    r"for|may|to|file|files|act|assign\w*|claims?|interests?|permission|years?|protect\w*|treaties)\b", re.I)
A_SENTENCE = re.compile(
    r"\b(?:redistribute|free software(?! foundation)|licen[sc]e|either version|version \d|holders?"
    r"|this (?:software|package|file))\b", re.I)


def holder(words):
    """The name in what follows the word copyright, or None: without years, signs, addresses and flourishes."""
    words = re.sub(rf"{SIGN}|\bcopyright\b", " ", words, flags=re.I)
    words = re.sub(r"<[^>]*>|\S+@\S+|\(?https?://\S+", " ", words)
    words = FLOURISH.sub(" ", words.strip())
    while True:  # "2001-2003, 2005, 2007-2010 by …"
        shorter = re.sub(r"^[\s,.:;–—&-]*(?:by|and)?\s+", "", YEARS.sub(" ", words, count=1))
        if shorter == words:
            break
        words = shorter
    words = re.sub(r"^\W*(?:by\s+)?|[\s,.:;*/#(-]+$", "", words.strip(), flags=re.I)
    words = re.sub(r"\s+", " ", words)
    words = re.sub(r" (Inc|Ltd|Corp|Co|Jr|e\.V)$", r" \1.", words)
    if len(words) < 2 or len(words) > 90 or not re.search(r"[^\W\d_]{2}", words):
        return None
    return None if NOT_A_HOLDER.match(words) or A_SENTENCE.search(words) else words


def holders_in_prose(text):
    """Names in notices such as "Copyright (C) 1999-2003 Jane Doe": a sign or a year must stand beside the word."""
    found = []
    for line in text.splitlines():
        at = re.search(rf"\bcopyright\b|{SIGN}", line, re.I)
        if not at:
            continue
        rest = line[at.start():]
        if not re.match(rf"(?:copyright\b)?[\s:,]*(?:{SIGN}[\s,:]*)*(?:copyright\b)?[\s:,]*(?:by )?[\s]*(?:{YEAR}|{SIGN})|"
                        rf"(?:copyright\b)?\s*{SIGN}", rest, re.I):
            continue
        name = holder(rest)
        if name:
            found.append(name)
    return found


def holders_in_field(value):
    """Every line of a DEP-5 Copyright field is a statement; one that ends with a comma goes on in the next line."""
    statements = []
    for line in value.splitlines():
        line = line.strip()
        if not line or line == ".":
            continue
        if statements and re.search(r"(?:,|\band|-)$", statements[-1]) and not re.match(rf"\W*(?:copyright|{SIGN})", line, re.I):
            statements[-1] += " " + line
        else:
            statements.append(line)
    return [name for name in map(holder, statements) if name]


def distinct(names):
    """Each once, whatever the capitals and the final full stop; the first spelling stays."""
    seen = {}
    for name in names:
        seen.setdefault(name.lower().rstrip("."), name)
    return sorted(seen.values(), key=str.lower)


# --- Documents -------------------------------------------------------------------------------------------

FIELD = re.compile(r"^([A-Za-z][A-Za-z-]*):[ \t]*(.*)$")


def fields(text):
    """(name in lower case, value) for every field of a machine-readable document, in order."""
    name, lines = None, []
    for line in text.splitlines():
        start = FIELD.match(line)
        if start:
            if name:
                yield name, "\n".join(lines)
            name, lines = start[1].lower(), [start[2]]
        elif line[:1] in (" ", "\t"):
            lines.append(line[1:])
        elif name and not line.strip():
            yield name, "\n".join(lines)
            name, lines = None, []
    if name:
        yield name, "\n".join(lines)


def kind_of(text):
    """'machine-readable' or 'free-form'."""
    if re.search(r"^Format(?:-Specification)?:", text[:4000], re.I | re.M):
        return "machine-readable"
    if re.search(r"^Files:[^\n]*\n(?:[^\n]+\n)*?License:", text, re.I | re.M):
        return "machine-readable"
    return "free-form"


def parse_fields(text):
    licences, holders = set(), []
    for name, value in fields(text):
        if name in ("license", "licence"):
            synopsis, _, body = value.partition("\n")
            named = names_in(synopsis)
            licences.update(named)
            if not named:  # no short name, or prose in its place: the text must speak for itself
                licences |= recognise(value) | referred(value)
        elif name == "copyright":
            holders += holders_in_field(value)
    return licences, holders


def parse(text):
    """The findings of one document."""
    kind = kind_of(text)
    licences, holders = parse_fields(text) if kind == "machine-readable" else (set(), [])
    # How sure we may be follows from where the names were found. It is a rule, not a measurement.
    confidence = 0.95 if licences else 0.0
    if not licences:
        pointed, read = referred(text), recognise(text)
        licences = pointed | read
        confidence = 0.85 if pointed else 0.7 if read else 0.1
    if not holders:
        holders = holders_in_prose(text)
    return {
        "kind": kind,
        "licences": sorted(without_weaker(licences), key=str.lower),
        "holders": distinct(holders),
        "confidence": confidence,
    }


def decode(raw):
    """Most documents are UTF-8, old ones Latin-1; NUL and other control signs have no place in jsonb."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    return re.sub(r"[\x00-\x08\x0b\x0e-\x1f\x7f]", "", text)


def tokens(length):
    return -(-length // CHARS_PER_TOKEN)


def read(path):
    """Findings, input tokens and output tokens of the document at `path`."""
    with open(path, "rb") as file:
        raw = file.read()
    findings = {"package": os.path.basename(os.path.dirname(path)), **parse(decode(raw))}
    return findings, tokens(len(raw)), tokens(len(json.dumps(findings, ensure_ascii=False)))


def main(arguments):
    as_row = arguments[:1] == ["--row"]
    paths = arguments[1:] if as_row else arguments
    if len(paths) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    findings, tokens_in, tokens_out = read(paths[0])
    if as_row:
        # A $ is escaped so that the shell worker may put the JSON between dollar quotes.
        body = json.dumps(findings).replace("$", "\\u0024")
        print(findings["confidence"], tokens_in, tokens_out, body, sep="\t")
    else:
        print(json.dumps(findings, ensure_ascii=False, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
