# Everything a newcomer needs: `make demo` runs the main job, `make test` passes the tests. Both set up what is missing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax-cache

.PHONY: demo test quick lint setup wheel-test services dashboards runbooks clean

demo: setup
	$(BIN)/runwatch demo

setup: .venv/ready

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	touch $@

# The whole gate: style, types, arrows, tests here and against the built wheel on the newest Python.
test: setup services lint
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder
	$(MAKE) wheel-test

# Without the tests that train or start servers.
quick: setup
	$(BIN)/pytest -m "not slow" -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

wheel-test: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" deploy/wheel-test

# The pages in docs/runbooks, from the docstrings of checks and nodes.
runbooks: setup
	$(BIN)/runwatch explain --all --write docs/runbooks

# Prometheus, Alertmanager and Chromium for the tests that need the real ones (Debian, Ubuntu).
services:
	@deploy/install-services

# The Grafana dashboards: written anew, checked against Grafana's own types, and drawn by its components from a live Prometheus.
# Takes minutes, npm and 475 MB.
dashboards: setup services
	$(BIN)/python deploy/grafana/generate.py
	cd deploy/grafana/preview && npm ci --no-audit --no-fund && npm run build
	RUNWATCH_PICTURES="$(CURDIR)/docs/images" $(BIN)/pytest tests/deploy/test_grafana_preview.py

clean:
	rm -rf .venv .venv-wheel build dist .jax-cache runs
