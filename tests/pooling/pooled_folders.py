"""Writes embedding models and rerankers with tiny random weights, and computes transformers' results."""

import json
import shutil

import numpy as np
import torch

from mmengine_shapes import checkpoint_path
from tests.llama.tiny import make_tiny
from tests.parity.parity_cases import load_reference, reference_inputs

CLASSES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}
TASK = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker's prompt as a chat template. sentence-transformers passes a pair as two messages with the
# roles "query" and "document".
PAIR_TEMPLATE = (
    "{%- macro part(role) -%}"
    "{{ messages | selectattr('role', 'eq', role) | map(attribute='content') | first }}{%- endmacro -%}"
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    f"<Instruct>: {TASK}\n<Query>: {{{{ part('query') }}}}\n<Document>: {{{{ part('document') }}}}"
    "{{ '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)


def mark(folder, *modules, **configs):
    """Write modules.json and the modules' settings, as sentence-transformers does. Return the folder."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": CLASSES["Transformer"]}]
    for number, kind in enumerate(modules, 1):
        place = f"{number}_{kind}"
        listed.append({"idx": number, "name": str(number), "path": place, "type": CLASSES[kind]})
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "config.json").write_text(json.dumps(configs.get(kind, {})))
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def set_in(path, **fields):
    """Set fields in a JSON file. Creates the file if there is none."""
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **fields}))


def embedding_folder(folder, mode="lasttoken"):
    """Write a text embedding model. Return transformers' model."""
    model = make_tiny(folder, "Qwen3")
    set_in(folder / "tokenizer_config.json", pad_token="<|end|>")
    mark(folder, "Pooling", "Normalize", Pooling={"word_embedding_dimension": 48, "pooling_mode": mode})
    prompts = {"query": f"Instruct: {TASK}\nQuery:", "document": ""}
    config = {"prompts": prompts, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    return model


def reranker_folder(folder, tokens=(11, 7)):
    """Write a text reranker that scores with the logits of `tokens` (true, false). Return transformers'
    model.
    """
    model = make_tiny(folder, "Qwen3")
    set_in(folder / "tokenizer_config.json", pad_token="<|end|>", chat_template=PAIR_TEMPLATE)
    set_in(folder / "config_sentence_transformers.json", model_type="CrossEncoder")
    reads = {"method": "forward", "method_output_name": "logits"}
    set_in(
        folder / "sentence_bert_config.json",
        transformer_task="text-generation",
        modality_config={"text": reads, "message": {**reads, "format": "flat"}},
        module_output_name="causal_logits",
    )
    mark(folder, "LogitScore", LogitScore={"true_token_id": tokens[0], "false_token_id": tokens[1]})
    return model


def media_folder(folder, *modules, **configs):
    """Copy mmengine's built-in checkpoint to a folder, as an embedding model or a reranker."""
    shutil.copytree(checkpoint_path(), folder)
    return mark(folder, *modules, **configs)


def text_state(model, token_ids):
    """Return the last token's state after the final norm, float32 [hidden_size], by transformers."""
    with torch.inference_mode():
        return model.model(torch.tensor([token_ids])).last_hidden_state[0, -1].numpy()


def text_logits(model, token_ids):
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1].numpy()


def media_outputs(processor, messages):
    """Return the last token's state and logits for a conversation, by transformers."""
    model = load_reference()
    inputs = reference_inputs(processor.prepare(messages))
    with torch.inference_mode():
        found = model(**inputs, output_hidden_states=True)
    return found.hidden_states[-1][0, -1].numpy(), found.logits[0, -1].numpy()


def unit(vector, dimensions=None):
    cut = np.asarray(vector[:dimensions], np.float64)
    return cut / np.linalg.norm(cut)
