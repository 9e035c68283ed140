#!/usr/bin/env bash
# Is `--device cuda` right, and how near does it come to what the device can do? Not yet run on a GPU.
#
#   benchmarks/gpu.sh              under 9 minutes; writes results/gpu_<device>.json after every part, and .md
#   benchmarks/gpu.sh --dry-run    the same code on the CPU, few and small; writes nothing
#
# Needs Python 3.11 or newer with torch (PYTHON=… says which one); mmengine need not be installed. Where there
# is no network, it takes what lies in the ignored folder .whl, which gpu_bring.py fills where there is one;
# and FlashInfer's kernels, if they were built before, from .whl/aot/<module>/<module>.so: else it takes some
# minutes to compile them, out of the nine. Without FlashInfer everything runs by Triton and torch.
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
        # FlashInfer's CUDA norms need nothing beside it; what it compiles goes with the scratch folder.
        export FLASHINFER_USE_CUDA_NORM=1 FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$scratch}
    else
        echo "the wheels in .whl are not for this Python: going on without them" >&2
    fi
fi
mkdir -p "$scratch/site"
export PYTHONPATH=$root:$root/plugins:$scratch/site${PYTHONPATH:+:$PYTHONPATH}
# Nothing is fetched; and looking for GPUs leaves CUDA alone in the process that forks the others.
export HF_HUB_OFFLINE=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
"$PYTHON" -P "$root/benchmarks/gpu/setup.py" "$scratch/site"
# Each part has a limit of its own, and all together what is left of the nine minutes; the JSON holds what was
# found before. This is for a process that does not even end then.
timeout --signal=INT --kill-after=10 $((520 - SECONDS)) \
    "$PYTHON" -P "$root/benchmarks/gpu/check.py" --seconds $((500 - SECONDS)) "$@"
