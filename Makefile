# Every target sets up what it needs by itself, in .venv; a second run starts at once.
# Other versions: make test PG=15,16,18    another Python: make test PYTHON=python3.12
# One test: make test TESTS="tests/unit -k undo"
.POSIX:
.SUFFIXES:

BIN = .venv/bin
STAMP = .venv/.installed
OLDEST = .venv/oldest
PG = 18
TESTS =
SUITES =
WORKERS = 2
PINNED = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-annotate --custom-compile-command "make lock"
COMPILE = $(PINNED) --all-extras

help:
	@echo 'make demo    the main job, on a PostgreSQL of its own'
	@echo 'make test    all tests (PG=15,16,18 for other versions)'
	@echo 'make oldest  what Alembic is for, on the oldest Alembic and SQLAlchemy 2.0'
	@echo 'make check   lint and test'
	@echo 'make lint    format, style, types, imports, spelling'
	@echo 'make bench   measurements'
	@echo 'make client-suites  the drivers own suites, directly and through observe mode (SUITES=--quick for CI)'
	@echo 'make docs    every command and option, in docs/cli.md'
	@echo 'make wheel   the package, in dist/'
	@echo 'make lock    renew requirements.lock from pyproject.toml'
	@echo 'make clean   remove everything that was made here'

demo: $(STAMP)
	$(BIN)/sqlguard demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --pg $(PG) $(TESTS)

oldest: $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -q -n $(WORKERS) --pg $(PG) \
		tests/unit/alembic tests/postgres/test_alembic*.py tests/postgres/test_orm.py

$(OLDEST)/.installed: $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(OLDEST) --no-deps 'alembic==1.13.0' 'sqlalchemy==2.0.*'
	touch $@

check: lint test

lint: format-check style types imports spelling

format-check: $(STAMP)
	$(BIN)/ruff format --check .

style: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --no-logo

spelling: $(STAMP)
	$(BIN)/codespell

bench: .venv/.bench
	$(BIN)/python -m benchmarks

.venv/.bench: $(STAMP) requirements-bench.lock
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-bench.lock
	@touch $@

client-suites: $(STAMP)
	$(BIN)/python -m scripts.client_suites $(SUITES)

docs: $(STAMP)
	$(BIN)/python -m typer sqlguard.cli utils docs --name sqlguard --output docs/cli.md

wheel: $(STAMP)
	$(BIN)/python -m hatchling build -t wheel -t sdist

package-test: wheel
	$(BIN)/python tests/packaging/smoke.py

lock: $(STAMP)
	$(COMPILE) --group dev --output-file requirements.lock pyproject.toml
	$(COMPILE) --constraint requirements.lock --output-file requirements-runtime.lock pyproject.toml
	$(PINNED) --group bench --constraint requirements.lock --output-file requirements-bench.lock

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.lock pyproject.toml scripts/set-up
	PYTHON='$(PYTHON)' sh scripts/set-up .venv
	@touch $(STAMP)
