#!/usr/bin/env bash
# What benchmarks/rivals/rivals_cpu.py measures beside mmengine, into the ignored folder build/rivals: llama.cpp, compiled for
# this CPU, and OpenVINO, in an environment of their own that borrows the project's torch.
#
#   benchmarks/rivals/environment.sh      once; some 15 minutes on two cores, 1.5 GB
#
# Needs the project's own environment (PYTHON=… says which one, else .venv), cmake, ninja and a C++ compiler.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
PYTHON=${PYTHON:-$root/.venv/bin/python}
build=$root/build/rivals
mkdir -p "$build"
cd "$build"

# llama.cpp, as llama-cpp-python has it. Its sources are compiled here and not by pip, which would not say for which
# CPU, and the official benchmark comes along: ours must not measure less of it than that does.
if [ ! -d llama_cpp_python ]; then
    "$PYTHON" -m pip download --quiet --no-deps --require-hashes --no-binary llama-cpp-python -d sdist \
        -r "$root/tests/gguf/vocabularies.txt"
    mkdir unpacked && tar xzf sdist/llama_cpp_python-*.tar.gz -C unpacked --strip-components 1
    mv unpacked llama_cpp_python
fi
cmake -S llama_cpp_python/vendor/llama.cpp -B llama -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TOOLS=ON >cmake.log
cmake --build llama -j"${JOBS:-2}" --target llama llama-bench llama-batched-bench llama-quantize
ln -sfn ../../llama/bin llama_cpp_python/llama_cpp/lib # where the package looks for libllama.so

if [ ! -x python/bin/python ]; then
    "$PYTHON" -m venv python
    site=$(python/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$PYTHON" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])' >"$site/project.pth"
    echo "$build/llama_cpp_python" >"$site/llama.pth"
fi
# torch stays the project's: a resolver that wants another one fails here.
"$PYTHON" -c 'import torch; print("torch==" + torch.__version__.split("+")[0])' >constraints.txt
python/bin/python -m pip install --quiet --only-binary :all: -c constraints.txt -r "$here/requirements.txt"
# What PyPI has of it fails to import beside a CPU build of torch, and nothing here looks at pictures.
python/bin/python -m pip uninstall --quiet --yes torchvision
python/bin/python -c 'import llama_cpp, openvino; print(llama_cpp.llama_print_system_info().decode(), openvino.__version__)'
