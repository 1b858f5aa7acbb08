# The two commands of a newcomer are `make quickstart` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# What is installed: for training, and besides for the tests.
TRAIN := $(VENV)/.train
STAMP := $(VENV)/.installed
# An old transformers, which reads what isles exports. It shares torch and all else.
OLD := $(VENV)/old-transformers
# Processes that run tests side by side; most of them wait most of the time.
WORKERS ?= 4
# `make test ORDER=random`, or of a seed that was printed: else the longest go first.
TESTS = $(BIN)/python -m tests -n $(WORKERS) --dist loadgroup --no-loadscope-reorder \
	$(if $(ORDER),--random-order $(ORDER))
# `make test-all PART=2/4`: one part of it.
PARTS = $(if $(PART),$(PART),1/4 2/4 3/4 4/4)
# pip, with a line for each package. Compiling all that is installed takes longer than its use.
INSTALL = $(BIN)/python -m pip install --no-compile --progress-bar off --disable-pip-version-check \
	--upgrade-strategy only-if-needed
SHOW = sed -u -n -E 's/^(Collecting [^ ]+).*/  \1/p; s/^(Installing collected packages):.*/  \1 …/p; /^ERROR/p'

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Else every command that is typed compiles all of isles anew, where this is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-all check size docs format clean

quickstart: $(TRAIN)
	@$(BIN)/python examples/quickstart.py

# The laws, and one path of every kind.
test: $(STAMP) $(OLD)/.installed
	@echo "installing what the test clusters need (sshd, Slurm), where it is missing …"
	@tests/lab/install.sh
	@echo "tests of make test, on $(WORKERS) workers …"
	@$(TESTS) -m "not gpu and not long"

# All other cases of the same laws, in parts of about an hour.
test-all: $(STAMP) $(OLD)/.installed
	@tests/lab/install.sh
	@for part in $(PARTS); do echo "part $$part of make test-all …"; \
		$(TESTS) -m "not gpu and long" --part $$part || exit; done

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py
	$(BIN)/python -m tests.size

# Lines of each room, and the files that only a neighbor imports.
size: $(STAMP)
	@$(BIN)/python -m tests.size

# The site of docs/, in site/: fails at a link or an anchor that leads nowhere.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs: $(STAMP)
	@echo "installing what the site of docs/ is made with …"
	@$(INSTALL) -e '.[docs]' | $(SHOW)
	@touch $@

format: $(STAMP)
	$(BIN)/ruff format src tests benchmarks examples docs
	$(BIN)/ruff check --fix src tests benchmarks examples docs

$(TRAIN): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "isles needs Python 3.11 or newer: make PYTHON=python3 …"; exit 1; }
	@echo "making the environment $(VENV) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing isles and what training needs, torch among it …"
	@$(INSTALL) -e '.[train]' | $(SHOW)
	@touch $@

$(STAMP): $(TRAIN)
	@echo "installing what the tests need besides: all engines and trackers, ruff, mypy …"
	@$(INSTALL) -e '.[train,bucket,ray,qlora,torchao,deepspeed,wandb,mlflow,hivemind,bench,test,dev]' | $(SHOW)
	@echo "compiling what is installed, as each of hundreds of commands would …"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some is of newer Pythons
	@touch $@

$(OLD)/.installed: $(STAMP)
	@echo "installing an old transformers, which a test reads exports with …"
	@rm -rf $(OLD)
	@$(BIN)/python -m venv --without-pip $(OLD)
	@$(BIN)/python -c "import sys; print(*(p for p in sys.path if p.endswith('site-packages')), sep='\n')" \
		> "$$(echo $(OLD)/lib/python3*/site-packages)/shared.pth"
	@$(BIN)/python -m pip --python $(OLD)/bin/python install --no-compile --progress-bar off \
		--disable-pip-version-check --no-warn-conflicts transformers==4.57.6 | $(SHOW)
	@touch $@

clean:
	rm -rf $(VENV) build site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
