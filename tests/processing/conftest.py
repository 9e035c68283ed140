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
    """transformers' processor of Qwen3-VL, images by Pillow; the video half needs torchvision."""
    from transformers import AutoImageProcessor, Qwen3VLProcessor

    class ImagesOnly(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return (
                None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)
            )

    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    template = reference_tokenizer.chat_template
    return ImagesOnly(images, reference_tokenizer, video_processor=None, chat_template=template)
