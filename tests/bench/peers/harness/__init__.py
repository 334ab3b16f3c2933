"""Side-by-side bench of job queues; README.md says what is measured and how."""
