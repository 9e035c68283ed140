import pytest
from parity_cases import Runner, load_reference, make_cases, reference_tokens


@pytest.fixture(scope="session")
def runner():
    return Runner()


@pytest.fixture(scope="session")
def cases(runner):
    return make_cases(runner.processor)


@pytest.fixture(scope="session")
def wanted(cases):
    """Greedy tokens of transformers, each request alone."""
    model = load_reference()
    return [reference_tokens(model, case) for case in cases]
