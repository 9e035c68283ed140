import pytest
import torch
from parity_cases import Runner, load_processor, load_reference, make_cases, reference_tokens

from mmengine.native import library

BACKENDS = {"kernels": "auto", "torch attention": "torch", "no compiler": "auto"}


@pytest.fixture(scope="module", params=BACKENDS)  # Per module: later modules need the compiler.
def backend(request, hidden_compiler, tmp_path_factory):
    """Yield the value for the setting `attention`. The compiler is hidden for the backend "no compiler"."""
    if request.param == "no compiler":
        with hidden_compiler(tmp_path_factory.mktemp("cache")):
            yield BACKENDS[request.param]
        return
    if library.load() is None:
        pytest.skip(f"no kernels here: {library.describe()}")
    yield BACKENDS[request.param]


@pytest.fixture(scope="module")
def runner(backend):
    return Runner(attention=backend)


@pytest.fixture(scope="session")
def cases():
    return make_cases(load_processor())


@pytest.fixture(scope="session")
def wanted(cases):
    """Return transformers' greedy tokens for each request, generated without batching."""
    model = load_reference()
    return [reference_tokens(model, case) for case in cases]


@pytest.fixture(scope="session")
def bfloat16_reference(cases):
    """Return transformers' model in bfloat16, and its greedy tokens for the first half of the requests."""
    model = load_reference(torch.bfloat16)
    return model, [reference_tokens(model, case) for case in cases[: len(cases) // 2]]
