# On a fresh machine with only Python 3.11 and make, each target does all its own set-up, in $(VENV).

PYTHON ?= python3.11
VENV ?= .venv
WORKERS ?= 5  # for two cores: the tests wait for other processes much of the time
BIN := $(VENV)/bin

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv takes a tenth of the time; where it finds no index, since that is written in pip's configuration, pip finds one.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) || $(PIP_INSTALL) $(1)
# mypy and import-linter look for packages in folders, not through the mapping in pyproject.toml.
LINKS := $(VENV)/links
ROOMS := src flows tasks blocks tests benchmarks tools
CODE = $(foreach room,$(ROOMS),$(if $(shell find $(room) -name '*.py' 2>/dev/null),$(room)))

.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE  # images set it; here it would have hundreds of processes compile all of Prefect anew
.PHONY: FORCE help demo test test-all test-newer test-prefect on-prefect check lint house layers types pages docs screenshots long deep integrations bench lock format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.demo  ## train, kill in the middle of an upload, resume, compare
	$(BIN)/prefect-tune demo

test: $(VENV)/.dev  ## the normal suite
	$(BIN)/python -m pytest -n $(WORKERS)

# Each Python that runs under its name, or is one of pyenv's, has a venv of its own.
ALL_PYTHONS := 3.11 3.12 3.13
NEWER_PYTHONS := 3.12 3.13
# What hangs on the interpreter most, and needs no server: values, JSON, locks, files, schedulers, the search.
QUICK_TESTS := tests/core/search tests/core/test_values.py tests/core/messages/test_target_messages.py \
	tests/core/documents/test_golden.py tests/core/journal/test_journal.py tests/core/experiment/test_trial_transitions.py \
	tests/core/test_display_text.py tests/stores/posix/test_posix_store.py \
	tests/stores/local/test_scratch.py tests/stores/local/test_staging.py
FIND_PYTHON = for each in python$$version "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python; do \
	"$$each" -c "import sys; sys.exit(sys.version.split('.')[:2] != '$$version'.split('.'))" 2>/dev/null \
	&& python=$$each && break; done
ON_EACH = failed=0; for version in $(1); do python=; $(FIND_PYTHON); \
	if [ -z "$$python" ]; then echo "Python $$version: not found, not tested"; continue; fi; echo "Python $$version:"; \
	{ $(MAKE) --no-print-directory PYTHON="$$python" VENV=$(VENV)-$$version $(VENV)-$$version/.dev && $(2); } || failed=1; \
	done; exit $$failed

test-all:  ## the normal suite on each Python that is there, 3.11 to 3.13
	@$(call ON_EACH,$(ALL_PYTHONS),$(VENV)-$$version/bin/python -m pytest -n $(WORKERS))

test-newer:  ## some seconds of it on 3.12 and 3.13, where they are there
	@$(call ON_EACH,$(NEWER_PYTHONS),$(VENV)-$$version/bin/python -W error::ResourceWarning -m pytest -q -n 2 $(QUICK_TESTS))

# The oldest Prefect that pyproject.toml allows and the newest that there is, over the lock, each in a venv of its own.
PREFECTS := oldest newest
PREFECT_oldest = "prefect==$(shell sed -n 's/^  "prefect>=\([0-9.]*\),.*/\1/p' pyproject.toml).0" "fastapi<0.151" "sqlalchemy<2.1"
PREFECT_newest = --upgrade "prefect>=3,<4" sqlalchemy
# What hangs on Prefect most: suspend, forms, retries, deployments, calls, artifacts, assets, the server of a script.
PREFECT_TESTS := tests/prefect_api tests/test_testing.py tests/suspension tests/deploy tests/cli/test_deploy.py \
	tests/monitoring/test_live_report.py \
	tests/flows/resuming/test_suspension.py tests/flows/deployments/test_deployed.py tests/flows/resuming/test_extending.py

test-prefect:  ## what hangs on Prefect most, on the oldest and the newest Prefect allowed
	@failed=0; for which in $(PREFECTS); do \
		$(MAKE) --no-print-directory WHICH=$$which VENV=$(VENV)-prefect-$$which on-prefect || failed=1; \
	done; exit $$failed

on-prefect: $(VENV)/.dev
	$(call INSTALL,$(PREFECT_$(WHICH)))
	$(BIN)/python -c 'import prefect; print("Prefect", prefect.__version__)'
	$(BIN)/python -m pytest -q -n 2 -m "not integrations" $(PREFECT_TESTS)

check: lint house layers types pages  ## lint, format, house numbers, layers, types, claims of the documentation

lint: $(VENV)/.dev
	$(BIN)/ruff check --quiet --output-format concise $(CODE)
	$(BIN)/ruff format --quiet --check --output-format concise $(CODE)

house: $(VENV)/.dev
	$(BIN)/python -m tools.house

layers: $(LINKS)
	PYTHONPATH=$(LINKS) $(BIN)/lint-imports --no-cache --no-logo

types: $(LINKS)
	MYPYPATH=$(LINKS):$(CURDIR) $(BIN)/mypy -p prefect_tune $(addprefix -p ,$(filter tests tools benchmarks,$(CODE)))
	$(BIN)/python -m tools.check_types

pages: $(VENV)/.dev
	$(BIN)/python -m tools.check_pages

$(LINKS): $(VENV)/.dev FORCE
	@rm -rf $(LINKS) && mkdir -p $(LINKS)/prefect_tune
	@ln -s $(CURDIR)/src/prefect_tune/* $(CURDIR)/flows $(CURDIR)/tasks $(CURDIR)/blocks $(LINKS)/prefect_tune/

docs: $(VENV)/.dev  ## the site, in site/: every page, option and public name, every link looked at
	$(BIN)/python -m tools.docs_site

journeys: $(VENV)/.dev  ## the files that a metric, a checkpoint, a decision and a Resume pass, traced: minutes
	$(BIN)/python -m tools.journeys

screenshots: $(VENV)/.dev  ## what one sees in Prefect's UI, in both themes, into build/screenshots
	$(BIN)/python -m pytest -n 0 -m "not deep" tests/browser

long: $(VENV)/.dev  ## what the normal suite proves by one case, by all of them; clicks in Chromium; pages of the documentation
	$(BIN)/python -m pytest -n $(WORKERS) -m "long and not deep and not integrations"

deep: $(VENV)/.dev  ## many kills and examples: 45 minutes on two cores
	$(BIN)/python -m pytest -n $(WORKERS) -m deep --timeout 3600

# A venv of its own: the tests of the frameworks that the lock does not hold.
integrations:  ## PyTorch, Lightning, Hugging Face, Keras, trees: kill the examples; the clouds' credential blocks
	@$(MAKE) --no-print-directory VENV=$(VENV)-integrations $(VENV)-integrations/.integrations
	$(VENV)-integrations/bin/python -m pytest -n 0 -m integrations --timeout 3600

bench: $(VENV)/.dev  ## the figures in benchmarks/
	$(BIN)/python -m benchmarks

format: $(VENV)/.dev  ## let ruff write
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# Exact versions with hashes and no address: they install from whatever index the machine is set up with.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
	--no-emit-index-url --no-emit-find-links --no-annotate --no-header
lock: $(VENV)/.venv  ## newest versions that fit, into requirements/
	$(LOCK) --extra dev --extra benchmark -o requirements/dev.txt pyproject.toml requirements/build.in
	$(LOCK) --extra demo -c requirements/dev.txt -o requirements/demo.txt pyproject.toml requirements/build.in

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) $(VENV)-integrations $(addprefix $(VENV)-,$(ALL_PYTHONS)) $(addprefix $(VENV)-prefect-,$(PREFECTS)) build dist site prefect_tune.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(ROOMS) -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --no-deps --require-hashes -r requirements/uv.txt
	@touch $@

# --no-deps and --no-build-isolation: nothing is installed, or even looked at, that the lock does not name.
$(VENV)/.demo: $(VENV)/.venv requirements/demo.txt pyproject.toml
	$(call INSTALL,--no-deps --require-hashes -r requirements/demo.txt)
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.venv requirements/dev.txt pyproject.toml
	$(call INSTALL,--no-deps --require-hashes -r requirements/dev.txt)
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# torch first, and by itself: nothing that comes after may choose another.
$(VENV)/.integrations: $(VENV)/.dev requirements/integrations.txt
	$(call INSTALL,"$$(grep '^torch==' requirements/integrations.txt)")
	$(call INSTALL,-r requirements/integrations.txt)
	@touch $@
