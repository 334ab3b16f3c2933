# shellcheck shell=bash
# What the demonstration assumes, in one place; `run` exports it to every process and the report prints it.
# An already exported variable wins.

: "${READ_PACE:=100000}"       # tokens per second a simulated model reads; the wait stands beside the real parsing
: "${READ_WINDOW:=16000}"      # tokens a reader holds at once; longer documents are read window by window
: "${PRICE_IN:=0.25}"          # dollars per million input tokens
: "${PRICE_OUT:=1.25}"         # dollars per million output tokens
: "${BUDGET_RUNNING:=4}"       # tasks running at once
: "${BUDGET_TOKENS:=40000}"    # tokens in flight at once: two full windows and a little
: "${LEASE_SECONDS:=4}"        # short, so that recovery is seen within the run
: "${WATCHED_LICENCE:=GPL-3}"  # the consumer reacts to packages under this one, or under it "or later"
