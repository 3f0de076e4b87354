# Baton: `make serve` runs the local stack, `make unit` the fast tests, `make test` and `make check` what CI runs.
PYTHON ?= python3
MODEL ?= $(or $(BATON_MODEL),demo)
PREFILL ?= $(or $(BATON_PREFILL),1)
DECODE ?= $(or $(BATON_DECODE),1)
LATENCY ?= $(or $(BATON_LATENCY),0)
PREFILL_TP ?= $(or $(BATON_PREFILL_TP),1)
DECODE_TP ?= $(or $(BATON_DECODE_TP),1)
PORT ?= $(or $(BATON_PORT),8000)

BIN := .venv/bin
STAMP := .venv/.installed
CLIENTS := .venv-clients/.installed
NODE_CLIENTS := tests/clients/node_modules/.installed

# Some images forbid Python to keep what it has compiled: each process would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve unit test chaos widths clients gpu model check format screenshots clean

serve: $(STAMP)
	@exec $(BIN)/baton serve --model "$(MODEL)" --prefill $(PREFILL) --decode $(DECODE) --latency $(LATENCY) \
	  --prefill-tp $(PREFILL_TP) --decode-tp $(DECODE_TP) --port $(PORT)

# Files are dealt out, in the order of tests/file_order.py, to processes with one core each. In `make test` a third one
# has what the others leave of two cores: tests of real processes wait for half of their time, for heartbeats and
# restarts, and others wait for programs and time limits. When one of them crashes, the run goes on without it and names
# the test: with another in its place it may never end.
DEALT := --dist loadfile --no-loadscope-reorder --max-worker-restart 0

unit test: export OMP_NUM_THREADS := 1

# The loop while one works: parts, rules and invariants, without what starts other programs or takes long.
unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(DEALT) -m "not gpu and not processes and not long" tests/property tests/unit

test: $(STAMP)
	$(BIN)/python -m pytest -n 3 $(DEALT) --durations 25 -m "not gpu and not chaos and not widths" \
	  tests/chaos tests/e2e tests/kernels tests/parity tests/model tests/property tests/unit
	@$(BIN)/python tests/needs.py

chaos: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 -m "not gpu" --ignore tests/chaos/test_soak.py tests/chaos
	SOAK_REQUESTS=500 SOAK_RECORD=1 $(BIN)/python -m pytest -s -m "not gpu" tests/chaos/test_soak.py

# Workers of one, two and four ranks, at every pair of widths.
widths: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu" tests/parity/test_group_parity.py tests/unit/test_ranks.py tests/e2e/test_widths.py

# The gateway with the clients that people use, which have environments of their own; vLLM's takes gigabytes.
clients: $(STAMP) $(CLIENTS) $(NODE_CLIENTS)
	$(BIN)/python -m benchmarks.peers.install_vllm
	.venv-clients/bin/python -m pytest tests/clients

# On a machine with a GPU: the kernels there, and what needs one.
gpu: $(STAMP)
	$(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest -m gpu tests/unit

# The protocol, exhaustively, with more going wrong at once than in `make test`. What somebody has set for servers of
# their own does not concern it.
model: $(STAMP)
	env $$(env | sed -n 's/^\(BATON_[^=]*\)=.*/-u \1/p') PYTHONPATH=tests $(BIN)/python tests/model/handoff_scenarios.py

check: $(STAMP)
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format --no-cache .
	$(BIN)/ruff check --no-cache --fix .

# Pictures of the dashboard under load, for the documentation; needs Debian's chromium.
screenshots: $(STAMP)
	$(BIN)/python -m benchmarks.screenshot

# The stamp is written last, so that an interrupted installation starts again. What is imported is compiled then: most of
# it never is, and compiling all takes as long as installing it.
$(STAMP): pyproject.toml
	@$(BIN)/python -c 'import pip, sys; assert sys.version_info >= (3, 11)' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@echo "installing Baton into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	@touch $(STAMP)

$(CLIENTS): tests/clients/requirements.txt
	$(PYTHON) -m venv --clear .venv-clients
	@echo "installing the clients written in Python into .venv-clients (a minute)"
	@.venv-clients/bin/python -m pip install --quiet --no-deps --no-compile --requirement $<
	@touch $@

$(NODE_CLIENTS): tests/clients/package.json tests/clients/package-lock.json
	@echo "installing the clients for Node into tests/clients/node_modules"
	@npm ci --silent --no-audit --no-fund --ignore-scripts --prefix tests/clients
	@touch $@

clean:
	rm -rf .venv .venv-clients tests/clients/node_modules build *.egg-info .mypy_cache .ruff_cache .hypothesis
