#!/usr/bin/env bash
# Installs the engines with which benchmarks/rivals/rivals_cpu.py compares mmengine: llama.cpp, compiled for this CPU,
# and OpenVINO. The engines get a separate environment in the ignored folder build/rivals, which uses the project's torch.
#
#   benchmarks/rivals/environment.sh      once; takes some 15 minutes on two cores, and 1.5 GB
#   benchmarks/rivals/environment.sh mtmd once; only llama.cpp and its libmtmd, for images_cpu.py; some 10 minutes
#
# Needs the project's environment (PYTHON=… is its Python; default: .venv), cmake, ninja and a C++ compiler.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
PYTHON=${PYTHON:-$root/.venv/bin/python}
build=$root/build/rivals
mkdir -p "$build"
cd "$build"

# llama.cpp in the version that llama-cpp-python contains. CMake compiles the sources for this CPU; pip would not show
# for which CPU it compiles. CMake also builds llama.cpp's own benchmarks, to check that our benchmark measures no lower
# speed for llama.cpp than they do.
if [ ! -d llama_cpp_python ]; then
    "$PYTHON" -m pip download --quiet --no-deps --require-hashes --no-binary llama-cpp-python -d sdist \
        -r "$root/tests/gguf/vocabularies.txt"
    mkdir unpacked && tar xzf sdist/llama_cpp_python-*.tar.gz -C unpacked --strip-components 1
    mv unpacked llama_cpp_python
fi
# GCC 12 assumes that ldtilecfg reads eight bytes, and drops the stores to the rest of the tile configuration. The next
# AMX instruction is then illegal. The barrier keeps the stores.
amx=llama_cpp_python/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
grep -q 'asm__ volatile' "$amx" ||
    sed -i 's/^ *_tile_loadconfig(&tc);/    __asm__ volatile("" ::: "memory");\n&/' "$amx"
cmake -S llama_cpp_python/vendor/llama.cpp -B llama -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TOOLS=ON >cmake.log
if [ "${1:-}" = mtmd ]; then
    cmake --build llama -j"${JOBS:-2}" --target llama mtmd
    # llama.cpp's converter needs this package.
    "$PYTHON" -m pip install --quiet --only-binary :all: --target converter "$(grep ^sentencepiece "$here/requirements.txt")"
    exit
fi
cmake --build llama -j"${JOBS:-2}" --target llama llama-bench llama-batched-bench llama-quantize
ln -sfn ../../llama/bin llama_cpp_python/llama_cpp/lib # The package looks for libllama.so here.

if [ ! -x python/bin/python ]; then
    "$PYTHON" -m venv python
    site=$(python/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$PYTHON" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])' >"$site/project.pth"
    echo "$build/llama_cpp_python" >"$site/llama.pth"
fi
# The project's torch must stay: pip fails here if a package requires another version.
"$PYTHON" -c 'import torch; print("torch==" + torch.__version__.split("+")[0])' >constraints.txt
python/bin/python -m pip install --quiet --only-binary :all: -c constraints.txt -r "$here/requirements.txt"
# PyPI's torchvision cannot be imported beside a CPU build of torch, and the comparisons use no images.
python/bin/python -m pip uninstall --quiet --yes torchvision
python/bin/python -c 'import llama_cpp, openvino; print(llama_cpp.llama_print_system_info().decode(), openvino.__version__)'
