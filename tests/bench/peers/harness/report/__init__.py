"""From samples to docs/bench: stats (medians and spread), tables (Markdown), plots (SVG), summary (for the README), goals (asked and got), page (all of it)."""
