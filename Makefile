.PHONY: install test test-all test-fast coverage lint format types check docs docs-generate docs-serve torture same-bits benchmark clean

install:  ## install with everything that development needs
	python -m pip install -e ".[dev]"
	pre-commit install

test:  ## the whole test suite
	pytest

test-all:  ## every test, with all cases of what the default suite tests by a few: about twice the time
	pytest -m ""

test-fast:  ## the tests of single parts, in less than a minute
	pytest -m "not slow and not program and not extended" $(addprefix tests/,checkpoint config data engine instrument models optim test_rooms.py)

coverage:  ## the whole test suite, and which lines it runs; tracing makes it half as slow again
	pytest --cov --cov-report=term --cov-fail-under=90

lint:  ## linter, format, spelling and plain English
	ruff check .
	ruff format --check .
	codespell
	python scripts/lint_language.py

format:  ## format, and mend what the linter can mend
	ruff check --fix .
	ruff format .

types:  ## static types
	mypy
	mypy --config-file tests/mypy.ini tests scripts

check: lint types test  ## what a change has to pass

docs:  ## the documentation as a site in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

docs-generate:  ## write what is taken from the code, such as tables of keys, into the pages
	python scripts/docs_hook.py

docs-serve:  ## the site on http://127.0.0.1:8000, built again when a page changes
	NO_MKDOCS_2_WARNING=1 python -m mkdocs serve

torture:  ## everything that machines and strangers do to runs, injected and counted: about an hour
	python scripts/torture.py

same-bits:  ## the same runs at a commit and here, compared bit for bit; COMMIT=main, or SHORT=1 for a third of the runs
	python scripts/same_bits.py $(or $(COMMIT),HEAD) $(if $(SHORT),--short)

benchmark:  ## start-up time against the bare imports
	python scripts/benchmark_startup.py

clean:  ## remove caches and build products, never outputs
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .coverage .coverage.* htmlcov .hypothesis
