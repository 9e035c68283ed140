"""Writes a tiny random SmolVLM2 in hub layout, and opens transformers' processor for it. The processor
handles images only, because videos need torchvision.
"""

import json
from types import SimpleNamespace

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmengine.testing.contract import make_lively

# A tile has 34 x 34 pixels. 6 x 6 patches cover 30 x 30 pixels and become 2 x 2 embeddings.
SIDE, PATCH, SCALE = 34, 5, 3
TEMPLATE = (  # The chat template in published SmolVLM2 folders.
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
IN_VOCABULARY = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
)
NAMED = {
    "end_of_utterance_token": "<end_of_utterance>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "image_token": "<image>",
}
TEXTS = ["User: what is in it?", "Assistant: a cat", "Frame from 00:01:", "series of two frames\n\n"] * 2
PREPROCESSOR = {
    **dict.fromkeys(("do_convert_rgb", "do_image_splitting", "do_normalize", "do_pad"), True),
    **dict.fromkeys(("do_rescale", "do_resize"), True),
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SmolVLMImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": SIDE},
    "processor_class": "SmolVLMProcessor",
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 4 * SIDE},
    "video_sampling": {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": SIDE}},
}


def write_words(folder):
    """Write all files except config.json and the weights. Returns the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    wanted = {"special_tokens": list(IN_VOCABULARY), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, **wanted))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {
        "bos_token": "<|im_start|>",
        "eos_token": "<end_of_utterance>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "extra_special_tokens": NAMED,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    end = tokenizer.token_to_id("<end_of_utterance>")
    embeds = (SIDE // PATCH // SCALE) ** 2
    for name, values in (
        ("tokenizer_config.json", words),
        ("preprocessor_config.json", PREPROCESSOR),
        ("processor_config.json", {"image_seq_len": embeds, "processor_class": "SmolVLMProcessor"}),
        ("chat_template.json", {"chat_template": TEMPLATE}),
        ("generation_config.json", {"eos_token_id": end, "pad_token_id": 2, "bos_token_id": 1}),
    ):
        (folder / name).write_text(json.dumps(values))
    return tokenizer


def make_tiny(folder, seed=3, **fields):
    """Write the model to `folder`, and return it as transformers' model in float32. `fields`: config fields
    of the text model.
    """
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    tokenizer = write_words(folder)
    text = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        **fields,
    }
    vision = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,  # A head has 24 values.
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=tokenizer.token_to_id("<image>"),
    )
    torch.manual_seed(seed)
    model = SmolVLMForConditionalGeneration(config).eval()
    make_lively(model)
    # An answer must not contain an image token, because transformers would then expect another image.
    with torch.no_grad():
        model.lm_head.weight[tokenizer.token_to_id("<image>")] = 0
    model.save_pretrained(folder)
    hub = {**json.loads((folder / "config.json").read_text()), "text_config": text, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(hub))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.token_to_id("<end_of_utterance>")})
    )
    return model


def images_only(folder):
    """Return transformers' processor for images only, with its Pillow backend."""
    from transformers import AutoImageProcessor, AutoTokenizer, SmolVLMProcessor
    from transformers.models.smolvlm import processing_smolvlm

    class ImagesOnly(SmolVLMProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return (
                None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)
            )

    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # Images do not need it.
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    return ImagesOnly(
        images,
        AutoTokenizer.from_pretrained(folder),
        video_processor=SimpleNamespace(num_frames=None, fps=None, model_input_names=[]),
        image_seq_len=json.loads((folder / "processor_config.json").read_text())["image_seq_len"],
        chat_template=TEMPLATE,
    )


def patches_of(pixel_values):
    """Convert transformers' tiles, float [n, 3, side, side], to the uint8 patches that our encoder reads."""
    seen, joined = SIDE // PATCH * PATCH, SIDE // PATCH // SCALE
    values = (pixel_values.double() * 0.5 + 0.5) * 255
    pixels = values.round()
    assert (values - pixels).abs().max() < 1e-3
    tiles = pixels[:, :, :seen, :seen].reshape(len(pixels), 3, joined, SCALE, PATCH, joined, SCALE, PATCH)
    return tiles.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * PATCH**2).to(torch.uint8).numpy()
