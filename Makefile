# make demo | test | lab | lint | build | clean. Each sets up what it needs; a second run reuses it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# One thread for the tests' tiny matrices: starting threads costs more than they save.
TEST_ENV := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONHASHSEED=0

.PHONY: demo test lab lint build clean

$(VENV)/.course: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[course]'
	touch $@

$(VENV)/.test: $(VENV)/.course
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[course,test]'
	touch $@

demo: $(VENV)/.course
	$(BIN)/minillm demo

lab: $(VENV)/.course
	$(BIN)/minillm fetch
	$(BIN)/jupyter lab notebooks/00_start_here.ipynb

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check minillm tests
	$(BIN)/mypy

test: $(VENV)/.test lint
	$(BIN)/minillm fetch
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) tests
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) --dist loadfile --nbval exercises solutions
	$(TEST_ENV) MINILLM_STRICT=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --nbval-lax solutions notebooks

build: $(VENV)/.course
	$(BIN)/minillm build

clean:
	rm -rf $(VENV) build *.egg-info
