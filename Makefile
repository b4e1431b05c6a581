# Every target first brings its environment in .venv up to date.
PYTHON := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu demo wheel test check format slow faults test-page test-ray test-slurm test-matrix regressions regressions-update docs

help:
	@echo "make setup      make .venv and install the package and its requirements"
	@echo "make setup-gpu  the same, with xformers and NVML for NVIDIA GPUs"
	@echo "make demo       train the built-in example: check, train, score, images; fails if a gate refuses it"
	@echo "make wheel      build the package: dist/lora_trainer-*.whl, the same bytes each time"
	@echo "make test       run the tests"
	@echo "make check      lint, format, types, imports, pages of the docs that come from code"
	@echo "make slow       run the tests that take too long for make test (an hour on two cores)"
	@echo "make faults     run the long fault suite and print its table (an hour on two cores)"
	@echo "make test-slurm   run a batch on a SLURM cluster of one node; SLURM_PACKAGES=DIR: from Debian packages kept there"
	@echo "make test-ray   run batches on a Ray cluster of several nodes on this machine (ten minutes)"
	@echo "make test-page  run the tests of the page in Chromium, which must be installed"
	@echo "make test-matrix  run the exactness tests with other instruction sets and numbers of threads"
	@echo "make regressions  compare speed ratios, memory plans and losses with tests/regressions.json (4 minutes)"
	@echo "make regressions-update  write that file, where a change is meant"
	@echo "make docs       build the documentation site: site/index.html"

setup:
	@scripts/setup_environment.sh

setup-gpu: setup
	@$(PYTHON) -m pip install --quiet -c constraints.txt xformers nvidia-ml-py

# With the settings of a 12 GB GPU and both gates enforced. Each demo has a folder of its own.
demo: setup
	@.venv/bin/lora-trainer demo --preset 12gb --output runs

wheel: setup
	@rm -rf dist && $(PYTHON) -m hatchling build --target wheel

test: setup
	@$(PYTHON) -m pytest -q -n logical --maxprocesses 8 --dist worksteal

check: setup
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports
	@$(PYTHON) scripts/write_docs.py --check

format: setup
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .
	@$(PYTHON) scripts/write_docs.py

slow: setup
	@$(PYTHON) -m pytest -q -m slow --ignore tests/faults --ignore tests/page --ignore tests/slurm --ignore tests/ray -n logical --maxprocesses 8 --dist worksteal

faults: setup
	@results=$$(mktemp -d); code=0; \
	FAULT_RESULTS=$$results $(PYTHON) -m pytest -q -m slow -n logical --maxprocesses 8 --dist worksteal tests/faults || code=$$?; \
	$(PYTHON) scripts/write_fault_table.py "$$results" || code=$$?; \
	rm -rf "$$results"; exit $$code

# munged, slurmctld and slurmd run as your user, on ports of their own, and are stopped in the end. Nothing is installed.
test-slurm: setup
	@SLURM_PACKAGES="$(SLURM_PACKAGES)" $(PYTHON) -m pytest -q -m slow tests/slurm

# Ray is an extra: the tests above skip it. A cluster of several nodes on this machine.
test-ray: setup
	@$(PYTHON) -m pip install --quiet -c constraints.txt ray
	@$(PYTHON) -m pytest -q -m slow tests/ray

# Debian's packages: chromium chromium-driver.
test-page: setup
	@$(PYTHON) -m pip install --quiet -c constraints.txt selenium axe-core-python
	@$(PYTHON) -m pytest -q -m slow tests/page

test-matrix: setup
	@scripts/test_matrix.sh

regressions: setup
	@$(PYTHON) scripts/check_regressions.py

regressions-update: setup
	@$(PYTHON) scripts/check_regressions.py --update

# mkdocs itself makes no network request; only the first installation does.
docs: setup
	@[ .venv/docs -nt .venv/installed ] || \
	{ $(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]' && touch .venv/docs; }
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@! grep -rlE '<(script|link|img|iframe)[^>]*(src|href)="(https?:)?//' site --include='*.html'
	@echo "site/index.html"
