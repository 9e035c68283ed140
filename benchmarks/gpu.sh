#!/usr/bin/env bash
# Checks the results of `--device cuda`, and compares its speed with the device's limits. Not yet run on a GPU.
#
#   benchmarks/gpu.sh              under 9 minutes; writes results/gpu_<device>.json after every part, and .md last
#   benchmarks/gpu.sh --dry-run    the same code on the CPU, with few small inputs; writes nothing
#
# Needs Python 3.11 or newer with torch (PYTHON=… names the interpreter); mmengine need not be installed. All wheels in
# the ignored folder .whl are installed for this run; gpu_bring.py fills the folder on a machine with a network.
# Prebuilt FlashInfer kernels are taken from .whl/aot/<module>/<module>.so; otherwise compiling them takes some of the
# nine minutes. Without FlashInfer, Triton and torch compute everything.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if compgen -G "$root/.whl/*.whl" >/dev/null; then
    if "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" \
        "$root"/.whl/*.whl; then
        if [ -d "$root/.whl/aot" ]; then
            mkdir -p "$scratch/site/flashinfer/data"
            cp -r "$root/.whl/aot" "$scratch/site/flashinfer/data/"
        fi
        # FlashInfer's CUDA norms need no other package. Compiled kernels are deleted with the scratch folder.
        export FLASHINFER_USE_CUDA_NORM=1 FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$scratch}
    else
        echo "the wheels in .whl are not for this Python: going on without them" >&2
    fi
fi
mkdir -p "$scratch/site"
export PYTHONPATH=$root:$root/plugins:$scratch/site${PYTHONPATH:+:$PYTHONPATH}
# No download. torch counts GPUs through NVML, because the process that forks the parts must not load CUDA.
export HF_HUB_OFFLINE=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
"$PYTHON" -P "$root/benchmarks/gpu/setup.py" "$scratch/site"
# check.py limits each part's time, and ends after the given seconds. `timeout` kills a check.py that hangs. The
# JSON file then has the results of the earlier parts.
timeout --signal=INT --kill-after=10 $((520 - SECONDS)) \
    "$PYTHON" -P "$root/benchmarks/gpu/check.py" --seconds $((500 - SECONDS)) "$@"
