"""The audit's parser, on small documents of each kind and on every real one this machine has."""

import glob
import json
import os
import subprocess
import sys

import pytest

DEMO = os.path.join(os.path.dirname(__file__), "..", "..", "demo")
sys.path.insert(0, DEMO)
import licences  # noqa: E402

MACHINE_READABLE = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: example

Files: *
Copyright: 1999-2003, 2007 Jane Doe <jane@example.org>
           (C) 2010, Example Works Inc. All rights reserved.
License: GPL-2+ with OpenSSL exception

Files: lib/*
Copyright: Copyright © 2001, 2002,
  2003 Free Software Foundation, Inc.
 2004 jane doe
License: LGPL-2.1+ or Artistic, and BSD-3-clause

License: GPL-2+
 This program is free software.
 .
 On Debian systems see `/usr/share/common-licenses/GPL-2'.
"""

FREE_FORM = """\
This package was debianized by A. Maintainer <am@example.org>.

Upstream Author: Some Body

Copyright (C) 1996, 1998-2001 Some Body
 * Copyright 2005 Other & Sons Ltd.
The copyright notice above must be kept. See the copyright holders for details.

This program is free software; you can redistribute it and/or modify
it under the terms of the GNU Lesser General Public License as published
by the Free Software Foundation; either version 2.1 of the License, or
(at your option) any later version.

The complete text is in `/usr/share/common-licenses/LGPL-2.1'.
The manual is under the GPL, /usr/share/common-licenses/GPL-3.
"""


def test_a_machine_readable_document_is_read_by_its_fields():
    found = licences.parse(MACHINE_READABLE)
    assert found["kind"] == "machine-readable"
    assert found["licences"] == ["Artistic", "BSD-3-clause", "GPL-2+", "LGPL-2.1+"]
    assert found["holders"] == ["Example Works Inc.", "Free Software Foundation, Inc.", "Jane Doe"]
    assert found["confidence"] == 0.95


def test_prose_is_read_by_references_and_well_known_sentences():
    found = licences.parse(FREE_FORM)
    assert found["kind"] == "free-form"
    assert found["licences"] == ["GPL-3", "LGPL-2.1+"]
    assert found["holders"] == ["Other & Sons Ltd.", "Some Body"]
    assert found["confidence"] == 0.85


def test_a_document_that_names_nothing_finds_nothing_and_says_so():
    found = licences.parse("Nobody knows.\n")
    assert found["licences"] == [] and found["holders"] == []
    assert found["confidence"] == 0.1


@pytest.mark.parametrize("spelt, name", [
    ("GPLv3+", "GPL-3+"), ("GPL-2.0-or-later", "GPL-2+"), ("gpl-2.0-only", "GPL-2"), ("LGPL v2.1", "LGPL-2.1"),
    ("GNU GPL", "GPL"), ("AGPL-3", "AGPL-3"), ("GFDL-1.3+", "GFDL-1.3+"), ("MIT", "Expat"), ("MIT/X11", "Expat"),
    ("BSD-3-Clause", "BSD-3-clause"), ("BSD 2-clause", "BSD-2-clause"), ("Apache-2", "Apache-2.0"),
    ("Apache 2.0", "Apache-2.0"), ("MPL-1.1", "MPL-1.1"), ("public domain", "public-domain"),
    ("GPL-3+ with Autoconf exception", "GPL-3+"), ("", None), ("Permission is hereby", None), ("x" * 60, None),
])
def test_one_licence_has_one_name(spelt, name):
    assert licences.canonical(spelt) == name


@pytest.mark.parametrize("synopsis, names", [
    ("GPL-1+ or Artistic", ["GPL-1+", "Artistic"]),
    ("GPL-2, LGPL-2.1 and/or MPL-1.1", ["GPL-2", "LGPL-2.1", "MPL-1.1"]),
    ("Redistribution and use in source and binary forms, with or without", []),
])
def test_a_synopsis_names_licences_and_a_sentence_in_its_place_does_not(synopsis, names):
    assert licences.names_in(synopsis) == names


BSD = ("Redistribution and use in source and binary forms, with or without\n * modification, are permitted provided: "
       "Redistributions of source code must retain the above copyright notice. ")
EXPAT = "Permission is hereby granted, free of charge, to any person obtaining a copy of this software. "


@pytest.mark.parametrize("text, names", [
    (BSD, {"BSD-2-clause"}),
    (BSD + "Neither the name of the University nor the names of its contributors", {"BSD-3-clause"}),
    (BSD + "All advertising materials mentioning features must display", {"BSD-4-clause"}),
    (BSD + "Neither the name of X. " + BSD, {"BSD-3-clause", "BSD-2-clause"}),
    (EXPAT, {"Expat"}),
    (EXPAT + "Except as contained in this notice, the name of X shall not be used", {"X11"}),
    ("the GNU General Public License as published by the Free Software Foundation; version 2.", {"GPL-2"}),
    ("GNU Affero General Public License version 3.0 or later", {"AGPL-3+"}),
    ("Apache License\n    Version 2.0, January 2004", {"Apache-2.0"}),
    ("It is in the public domain.", {"public-domain"}),
    ("under the same terms as Perl itself", {"Artistic", "GPL-1+"}),
    ("Any warranty is disclaimed.", set()),
])
def test_a_licence_is_known_by_its_own_sentences(text, names):
    assert licences.recognise(text) == names


def test_a_reference_counts_whatever_quotes_stand_around_it():
    text = "see `/usr/share/common-licenses/GPL-2' and \"/usr/share/common-licenses/Apache-2.0\"."
    assert licences.referred(text) == {"GPL-2", "Apache-2.0"}


def test_a_vague_name_gives_way_to_the_exact_one():
    assert licences.without_weaker({"GPL", "GPL-2", "GPL-2+", "LGPL", "Expat"}) == {"GPL-2+", "LGPL", "Expat"}


@pytest.mark.parametrize("words, name", [
    ("Copyright (C) 1995-98, 2001 Jane Doe <j@example.org>", "Jane Doe"),
    ("© 2020 by Example GmbH. All rights reserved.", "Example GmbH"),
    ("2004, 2005, 2006", None),
    ("Portions Copyright 2003 Élodie Müller", "Élodie Müller"),
    ("2008-present Example, Inc", "Example, Inc."),
    ("2016 The above copyright notice", None),
    ("2001 Free Software Foundation, Inc.", "Free Software Foundation, Inc."),
])
def test_a_holder_is_a_name_without_years_and_addresses(words, name):
    assert licences.holder(words) == name


def test_any_bytes_can_be_read():
    assert licences.decode("Müller".encode("latin-1")) == "Müller"
    assert "\x00" not in licences.decode(b"a\x00b")
    licences.parse(licences.decode(bytes(range(256)) * 4))


def test_the_shell_gets_one_line_it_can_quote(tmp_path):
    document = tmp_path / "copyright"
    document.write_text("Copyright 2001 Cash $json$ Ltd\n\nLicense: MIT\n", encoding="utf-8")
    program = os.path.join(DEMO, "licences.py")
    line = subprocess.run(["/usr/bin/python3", program, "--row", document], capture_output=True, text=True, check=True).stdout
    confidence, tokens_in, tokens_out, body = line.rstrip("\n").split("\t")
    assert "$" not in body and json.loads(body)["holders"] == ["Cash $json$ Ltd."]
    assert int(tokens_in) == 12 and int(tokens_out) > 0 and 0 <= float(confidence) <= 1


REAL = sorted(glob.glob("/usr/share/doc/*/copyright"))


@pytest.mark.skipif(len(REAL) < 100, reason="needs a machine with a hundred packages' documents")
def test_nearly_every_real_document_yields_a_licence_and_a_holder():
    findings = [licences.read(path)[0] for path in REAL]
    assert sum(bool(one["licences"]) for one in findings) >= 0.97 * len(REAL)
    assert sum(bool(one["holders"]) for one in findings) >= 0.9 * len(REAL)
    names = {name for one in findings for name in one["licences"]}
    assert {"GPL-2+", "Expat", "BSD-3-clause", "Apache-2.0"} <= names
    assert all(json.dumps(one) for one in findings)
