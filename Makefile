# Everything a person or a machine does with this repository, by one word each.

CARGO ?= cargo
BENCH_ARGS ?=
FUZZ_SECONDS ?= 60
COMPATIBILITY_ARGS ?= --write
SEEDS ?= 10000
ROUNDS ?= 10

.DEFAULT_GOAL := help
.PHONY: help setup build demo demo-vm demo-harvest test check tidy bench compatibility compatibility-setup
.PHONY: fuzz soak simulate stand-still

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install the system packages that tests and benches use, only what is missing
	@scripts/setup.sh all

build: ## build the hecaton command and libhecaton.so, optimised
	@$(CARGO) build --release --locked -p hecaton-cli -p hecaton-preload

demo: ## sort 1 GiB with a quarter of the memory that it asks for, the rest in the pool
	@scripts/setup.sh demo
	@scripts/demo.sh

demo-vm: ## a virtual machine of 4 GiB with 512 MiB local, beside plain memory and disk swap; 5 to 15 minutes
	@scripts/setup.sh demo-vm
	@scripts/demo-vm.sh

demo-harvest: ## virtual machines that come and go, and one that has what they leave; ends with a plot; 3 to 5 minutes
	@scripts/setup.sh demo-vm
	@scripts/demo-harvest.sh

test: ## set-up, then every check and test; ends with what was skipped and the counts
	@scripts/setup.sh test
	@scripts/test.sh full

check: ## the quick ones, before a commit: format, clippy, all but end-to-end tests, licences
	@scripts/test.sh quick

tidy: ## check the structure: circles, floors, sizes, headers; a ratchet over today's counts
	@$(CARGO) test --locked -p hecaton-tidy

bench: ## bench fault, stream and app; BENCH_ARGS=--quick for small sizes
	@scripts/setup.sh bench
	@scripts/bench.sh $(BENCH_ARGS)

compatibility: build ## measure which programs run on the pool as they do natively; writes and prints docs/compatibility.md; an hour
	@python3 scripts/compatibility $(COMPATIBILITY_ARGS)

compatibility-setup: ## install the packages from Debian, PyPI, npm, Go and Maven that `make compatibility` uses
	@scripts/compatibility/setup.sh

fuzz: ## run every fuzz target for FUZZ_SECONDS seconds each (default 60)
	@scripts/fuzz.sh $(FUZZ_SECONDS)

stand-still: ## the tests, each of which stands still three times for 2 s, as if its machine was paused (STAND_STILL_ARGS="-E 'test(mirror)'")
	@host=$$(rustc -vV | sed -n 's/^host: //p' | tr a-z- A-Z_); \
	env "CARGO_TARGET_$${host}_RUNNER=$(CURDIR)/scripts/stand-still.sh" \
	cargo nextest run --locked --workspace $(STAND_STILL_ARGS)

soak: ## campaigns that take hours: the suite ROUNDS times over (default 10), half of them under load; fuzzing; many seeds
	@scripts/setup.sh all
	@scripts/soak.sh $(ROUNDS)
	@$(MAKE) --no-print-directory stand-still
	@scripts/fuzz.sh 600
	@$(MAKE) --no-print-directory simulate SEEDS=100000

simulate: ## whole clusters, spaces alone, and a host's memory, under simulated failures, SEEDS runs of each (default 10000); says how a failure is repeated
	@HECATON_SEEDS=$(SEEDS) $(CARGO) test --release --locked -p hecaton-simulation --test simulation -- --nocapture
	@HECATON_SEEDS=$(SEEDS) $(CARGO) test --release --locked -p hecaton-broker --test simulation -- --nocapture
