# Two commands do everything on a fresh machine: `make run` and `make test`.
.PHONY: run demo mixed test test-long chaos suspend usage-long soak fuzz peers routers copies llama quickstart check deny build dist portable package package-long cuda candle-cuda thin vulkan arm candle mlx upstreams dynamo vllm agents setup fmt bench bench-program bench-program-dist plan clients help

# One profile for the binary and the tests: llama.cpp is compiled once.
PROFILE := --release
# Prints the seconds that a command took.
TIMED := scripts/timed.sh
# OpenMP threads that spin endlessly while they wait starve other processes on a small or shared machine.
export GOMP_SPINCOUNT ?= 5000
export CMAKE_GENERATOR ?= Ninja
# scripts/setup.sh puts a newer pip here if the system's is too old to report where a package is.
export PATH := $(CURDIR)/target/pip/bin:$(PATH)
ifneq (,$(shell command -v ccache 2>/dev/null))
export CMAKE_C_COMPILER_LAUNCHER ?= ccache
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
endif

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

run: build ## Install what is missing, build, fetch the default model, and serve it on http://127.0.0.1:8080
	target/release/baton serve $(ARGS)

demo: build ## Hand a long prompt from one node to another on this machine, and show where the time went
	target/release/baton demo $(ARGS)

quickstart: build ## Pair, discover and hand over between three network namespaces, as docs/quickstart.md shows (Linux, half a minute)
	scripts/quickstart.sh $(ARGS)

build: setup ## Build the binary
	cargo build $(PROFILE) --locked

# Rust's parts and llama.cpp's are for the same macOS, which is what the wheel's tag and the formula say.
ifeq (Darwin,$(shell uname))
dist: export MACOSX_DEPLOYMENT_TARGET ?= 14.0
endif
dist: setup ## Build the binary to install on this machine: optimised as a whole, a third less CPU a request (10 to 20 minutes)
	cargo build --profile dist --locked

portable: setup ## The same for other machines, with kernels for every x86-64 or Arm processor: target/portable/dist/baton and lib
	scripts/bundle.sh dist dynamic-backends target/portable

package: $(if $(filter Darwin,$(shell uname)),dist,portable) ## Pack it: a tarball, a wheel and a .deb, with checksums, in target/packages (docs/install.md)
	scripts/package/all.sh $(if $(filter Darwin,$(shell uname)),target/dist,target/portable/dist) target/packages

package-long: portable ## The same, then install, run, upgrade and remove each in a bare Debian 12 and 13; writes docs/install.md
	INSTALL_PAGE=docs/install.md scripts/check-packages.py target/portable/dist

cuda: ## Build with CUDA, whose toolkit is fetched if it is missing: target/cuda/release/baton and lib (an hour; ARCHS="121 90")
	scripts/cuda/build.sh

candle-cuda: ## Build candle for an NVIDIA card (ARCH=121), with a toolkit from packages if none is installed (half an hour)
	scripts/cuda/candle.sh

thin: ## Build and try the binary without llama.cpp, with no C++ compiler
	scripts/check-thin-build.sh

vulkan: ## Hand KV between the processor and Vulkan, on Mesa's software driver if there is no GPU
	scripts/check-vulkan.sh

arm: build ## Cross-compile for aarch64 Linux, pack, test under qemu-user, hand KV to and from this machine (about an hour)
	target/release/baton pull smollm2
	scripts/check-arm.sh

candle: build ## Build without C++ and serve with candle, then test it beside llama.cpp (docs/backends.md; 15 minutes)
	scripts/check-candle.sh

mlx: build ## Install mlx-lm, test its engine beside llama.cpp, and hand KV over in both directions (docs/mlx.md; half an hour)
	@scripts/setup.sh test
	scripts/check-mlx.sh

upstreams: build ## Run in front of llama-server and llama-cpp-python's server, which are built first (10 minutes)
	@scripts/setup.sh test
	target/release/baton pull smollm2
	scripts/check-upstreams.sh

dynamo: build ## Run in front of NVIDIA Dynamo with simulated workers (downloads 0.7 GB of packages)
	scripts/check-dynamo.sh

vllm: build ## Run in front of vLLM, alone and as a pair, and with vLLM as a prefill node (downloads 6.7 GB of packages)
	scripts/check-vllm.sh

agents: build ## Let coding agents do a task with a scripted model and a scripted upstream (downloads 4 GB of packages)
	@scripts/setup.sh test
	cargo build $(PROFILE) --locked --workspace --bin scripted-gguf
	scripts/check-agents.sh

mixed: build ## Run endpoint and nodes of this tree and of an older commit together; builds that first (COMMIT=…; 15 minutes)
	scripts/check-mixed.py $(COMMIT)

setup: ## Install build tools that are missing (says what, before it does)
	@scripts/setup.sh build

test: setup ## Everything CI runs: checks, unit tests, cross-process tests with the real model, real clients
	@scripts/run-all.sh

test-long: setup ## What `make test` leaves out: random cases, clients by their other route, schemathesis, mlx-lm, the quickstart, the thin build (over an hour)
	@scripts/setup.sh test
	LONG_PAGE=CONTRIBUTING.md scripts/run-long.sh

chaos: build ## Break nodes and links under 500 requests; writes the figures into docs/results/reliability.md
	target/release/baton pull smollm2
	CHAOS_REQUESTS=$${CHAOS_REQUESTS:-500} CHAOS_PAGE=docs/results/reliability.md \
		cargo test $(PROFILE) --locked --test stress chaos:: -- --nocapture

usage-long: build ## Kills and restarts an endpoint under 10,000 requests; what is kept must be what clients counted
	BATON_TEST_USAGE_REQUESTS=$${USAGE_REQUESTS:-10000} \
		cargo test $(PROFILE) --locked --test endpoint usage::the_kept_usage -- --nocapture

soak: build ## Mixed clients and faults for SOAK_MINUTES (30); writes the figures into docs/results/reliability.md
	target/release/baton pull smollm2
	SOAK_MINUTES=$${SOAK_MINUTES:-30} SOAK_PAGE=docs/results/reliability.md \
		cargo test $(PROFILE) --locked --test stress soak:: -- --nocapture

fuzz: setup ## Fuzz every parser for FUZZ_SECONDS (600) in total; docs/fuzzing.md
	scripts/fuzz.sh

suspend: ## Stop an endpoint and its nodes for two minutes, as a laptop that sleeps
	SUSPEND_SECONDS=$${SUSPEND_SECONDS:-120} cargo test $(PROFILE) --locked --test endpoint suspend:: -- --nocapture

# Clippy sees candle, too, which the default build leaves out, and then the program that people install, without what tests and
# benchmarks turn on.
check: ## Gates of scripts/gates.py, formatting, lints, docs and the direction of dependencies
	scripts/gates.py
	scripts/test_gates.py
	scripts/check-docs.py
	cargo fmt --all --check
	@$(TIMED) clippy cargo clippy $(PROFILE) --locked --workspace --all-targets --features baton/candle -- -D warnings
	@$(TIMED) "clippy without what only measures" cargo clippy $(PROFILE) --locked -- -D warnings
	@RUSTDOCFLAGS="-D warnings" $(TIMED) doc cargo doc $(PROFILE) --locked --workspace --no-deps --quiet
	scripts/check-dependencies.sh
	@$(TIMED) deny scripts/deny.sh

deny: ## Licences and sources of everything that is linked in
	scripts/deny.sh

clients: build ## Only the tests with real clients
	@scripts/setup.sh test
	scripts/run-clients.sh

# The benchmarks are a program of their own, which starts the `baton` beside it. With --workspace, dependencies have the features
# that everything else is built with, and are not compiled again.
bench-program: build
	cargo build $(PROFILE) --locked --workspace --bin baton-bench

bench-program-dist: dist
	cargo build --profile dist --locked --workspace --bin baton-bench

bench: bench-program ## Build the benchmarks, target/release/baton-bench, and compare the engine with the plain llama.cpp loop
	target/release/baton-bench engine $(ARGS)

peers: bench-program-dist ## Measure Baton beside nginx, vllm-router and sglang-router, which are installed under target/peers (15 minutes, and dist)
	RESULTS_PAGE=docs/results/endpoint.md scripts/bench-peers.sh

routers: build ## Play one trace to Baton, sglang-router and vllm-router in front of the same simulated servers (three minutes)
	scripts/bench-routers.sh

copies: build ## Fetch a model once and copy it between three network namespaces on links of 1 and 2.5 Gb/s, beside plain copies (two minutes)
	scripts/bench-copies.py

llama: bench-program-dist ## Measure Baton's engine beside llama-server, which is built first (half an hour or more, and dist)
	@scripts/setup.sh test
	RESULTS_PAGE=docs/results/engines.md scripts/bench-llama-server.sh

plan: bench-program ## Run the planner on simulated machines; the figures of docs/results/planning.md
	target/release/baton-bench plan $(ARGS)

fmt: ## Format the code
	cargo fmt --all
