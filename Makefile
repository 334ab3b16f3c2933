# Everything is done by scripts/ and tests/run; this file only names them. PG_MAJOR=17 make test takes
# another PostgreSQL.

.PHONY: help setup build demo test bench install psql fmt lint clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile | expand -t 18

setup: ## install Debian packages and cargo-pgrx where they are missing
	@scripts/setup

build: setup ## build into a private copy of PostgreSQL
	@scripts/build

demo: build ## the licence audit of this machine's packages, on a private server
	@scripts/server run --database demo --no-extension -- demo/run

test: setup ## all tests, on private servers
	@tests/run

psql: build ## psql on a private server with the extension created
	@scripts/server run

bench: setup ## measure beside other queues, into docs/bench: hours; QUICK=1, ONLY=, SCENARIOS=, ROUNDS=, NEW=1, RETRY=1
	@tests/bench/peers/run $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(SCENARIOS),--scenarios $(SCENARIOS)) \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(NEW),--new) $(if $(RETRY),--retry)

install: setup ## build and install into the system's PostgreSQL (the pg_config on PATH, or PG_CONFIG)
	@scripts/install

fmt: ## format the Rust code
	cargo fmt --all

lint: setup ## formatting and clippy
	@tests/run lint

clean: ## remove what was built and staged
	@scripts/clean
