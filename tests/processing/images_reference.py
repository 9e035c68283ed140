"""transformers' Qwen3-VL processor without the video processor, which needs torchvision."""

from transformers import AutoImageProcessor, Qwen3VLProcessor


class ImagesOnly(Qwen3VLProcessor):
    def check_argument_for_proper_class(self, name, argument):
        return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)


def images_only(folder, tokenizer):
    """Return transformers' processor for images only, with its Pillow backend."""
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    return ImagesOnly(images, tokenizer, video_processor=None, chat_template=tokenizer.chat_template)
