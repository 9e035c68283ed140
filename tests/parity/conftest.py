import pytest
from parity_cases import Runner, load_processor, load_reference, make_cases, reference_tokens

from mmengine.native import library

BACKENDS = {"kernels": "auto", "torch attention": "torch", "no compiler": "auto"}


@pytest.fixture(scope="module", params=BACKENDS)  # what follows must find its compiler again
def backend(request, hidden_compiler, tmp_path_factory):
    """What `attention` is to be, in an environment with or without a compiler."""
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
    """Greedy tokens of transformers, each request alone."""
    model = load_reference()
    return [reference_tokens(model, case) for case in cases]
