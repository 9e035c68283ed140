import pytest

from mmengine_qwen3_vl.processing import load_processor
from mmengine_shapes import checkpoint_path


@pytest.fixture(scope="session")
def folder():
    return checkpoint_path()


@pytest.fixture(scope="session")
def processor(folder):
    return load_processor(folder)


@pytest.fixture(scope="session")
def reference_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="session")
def reference(folder, reference_tokenizer):
    """Return transformers' Qwen3-VL processor with its Pillow backend. The processor handles images only,
    because videos need torchvision.
    """
    from tests.processing.images_reference import images_only  # transformers is slow to import.

    return images_only(folder, reference_tokenizer)
