"""Tiny random text models in transformers' own format, with a tokenizer and a chat template."""

import json

from tests.models.text_reference import EXPERTS, Kind, make_reference
from tests.processing.test_text_models import NAMES, TEMPLATE, trained

SPARE_ROWS = 3  # Embedding rows without a token, as in models with a padded vocabulary.
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Qwen3Moe": EXPERTS,
}


def make_tiny(folder, architecture="Llama", **sizes):
    """Write the model to `folder`, and return it as transformers' model in float32."""
    tokenizer = trained()
    rows = tokenizer.get_vocab_size() + SPARE_ROWS
    ends = {"bos_token_id": 0, "eos_token_id": tokenizer.token_to_id("<|end|>")}
    model = make_reference(
        folder,
        Kind(
            architecture,
            {"vocab_size": rows, "max_position_embeddings": 2048, **ends, **MODELS[architecture], **sizes},
        ),
        seed=4,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model
