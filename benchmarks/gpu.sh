#!/usr/bin/env bash
# Checks `--device cuda` with the torch backend, and measures it. Not yet run on a GPU.
#
#   benchmarks/gpu.sh              tokens against the CPU's, speeds; writes results/gpu_<device>.json
#   benchmarks/gpu.sh --dry-run    the same code on the CPU, with few requests and small sizes; writes nothing
#
# Needs Python 3.11 or newer with torch (PYTHON=… says which one); mmengine need not be installed.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH=$root:$root/plugins:$scratch${PYTHONPATH:+:$PYTHONPATH}
"$PYTHON" "$root/benchmarks/gpu_setup.py" "$scratch"
"$PYTHON" "$root/benchmarks/gpu_check.py" "$@"
