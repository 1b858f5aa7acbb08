# The two commands of a newcomer are `make quickstart` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes that run tests side by side, a module at a time; many tests mostly wait. 0: one by one.
WORKERS ?= 3
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Else every command that tests type compiles all of isles anew, where this is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-all check docs format clean

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart.py

test: $(STAMP)
	tests/lab/install.sh
	$(BIN)/python -m pytest -m "not gpu and not long" $(SIDE_BY_SIDE)

# With all cases of the same laws: an hour and more.
test-all: $(STAMP)
	tests/lab/install.sh
	$(BIN)/python -m pytest -m "not gpu" $(SIDE_BY_SIDE)

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

# The site of docs/, in site/: fails at a link or an anchor that leads nowhere.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@

format: $(STAMP)
	$(BIN)/ruff format src tests benchmarks examples docs
	$(BIN)/ruff check --fix src tests benchmarks examples docs

$(STAMP): pyproject.toml
	command -v $(PYTHON) >/dev/null || { echo "isles needs Python 3.11 or newer: make PYTHON=python3 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -e '.[train,qlora,deepspeed,wandb,mlflow,hivemind,test,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
