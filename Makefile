# make demo   what it does, on this machine, in a minute    make test   lint, handbook, all tests
# make docs   the handbook, into site/                       make attack  oracles against hocket, an hour
#
# PYTHON picks the interpreter of .venv (3.11 or newer): make test PYTHON=python3.12. VENV is another
# folder than .venv: make test-core VENV=.venv-3.13 PYTHON=python3.13 needs no torch.
# Where no local wheel folder is configured for pip, torch comes from the registry, which on Linux is
# the large CUDA build. UV_TORCH_BACKEND=cpu in the environment asks uv for the small CPU build.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Three for two cores: a good part of the tests wait for processes, timeouts and sleeping stages.
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist worksteal
QUICK := -m 'not runtime and not slow'
CONSTRAINTS := requirements/constraints.txt
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
TEST := $(VENV)/.installed-test
PARTNERS := $(VENV)/.installed-partners

.DEFAULT_GOAL := help
.PHONY: help .venv demo docs test test-core test-partners coverage attack lint bench clean
.NOTPARALLEL:

help:
	@echo 'make demo | test | test-core | test-partners | coverage | attack | lint | docs | bench | .venv | clean'

.venv: $(DEV)

# $(call install,EXTRAS): this package, editable, with EXTRAS. uv does not read pip's configuration,
# so its wheel folders (several, one or none) are handed over; pip, the fallback, reads it by itself.
# `pip config list` and not `get`: the latter looks into the user's file only. It prints Python strings.
define install
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@links="$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config list 2>/dev/null \
	    | sed -n -e "/^[a-z]*\.find-links=/!d; s/^[^=]*=//; s/\\\\n/ /g; s/['\"]//g; p")}"; \
	args=; for link in $$links; do args="$$args --find-links $$link"; done; \
	echo "installing hocket[$(1)] into $(VENV)"; \
	{ $(BIN)/python -m pip install -q uv \
	  && UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip install -p $(BIN)/python $$args \
	       -c $(CONSTRAINTS) -e '.[$(1)]'; } \
	|| { echo "uv could not do it; trying pip" >&2; \
	     $(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[$(1)]'; }
endef

$(CORE): pyproject.toml $(CONSTRAINTS)
	$(call install,torch)
	@touch $@

# The dev environment holds all of the core and the test one, so it counts as all three.
$(DEV): pyproject.toml $(CONSTRAINTS)
	$(call install,dev$(,)torch)
	@touch $(CORE) $(TEST) $@

$(TEST): pyproject.toml $(CONSTRAINTS)
	$(call install,test)
	@touch $@

$(PARTNERS): pyproject.toml $(CONSTRAINTS)
	$(call install,test$(,)torch$(,)partners)
	@touch $@

$(DOCS): pyproject.toml $(CONSTRAINTS)
	$(call install,docs)
	@touch $@

, := ,

demo: $(CORE)
	$(BIN)/python -m hocket demo

# The variable asks the theme not to speak about a MkDocs 2 that is not in use here.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/check_site.py site

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check

test: lint docs
	$(PYTEST)

test-core: $(TEST)
	$(PYTEST) $(QUICK)

# Of Megatron-LM and transformers: make test-partners VENV=.venv-partners
test-partners: $(PARTNERS)
	$(PYTEST) tests/megatron tests/runtime/test_huggingface.py

# Of all but what needs processes and torch, which only the whole suite runs.
coverage: $(DEV)
	$(PYTEST) $(QUICK) --cov --cov-report=
	$(BIN)/coverage report

# ATTACK_SECONDS=600 make attack takes ten minutes; the seeds that it prints repeat what it found.
attack: $(DEV)
	$(BIN)/python tests/attack.py

bench: $(DEV)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv .venv-* .coverage build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
