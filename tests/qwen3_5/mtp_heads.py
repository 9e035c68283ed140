"""Adds random multi-token-prediction heads to tiny checkpoints of the hybrid family. By construction, a head
predicts some, but not all, of its model's tokens.

The model's next token depends mostly on the previous token, because the model's layers add little to the
embedding. The head passes the embedding of a token to the model's LM head. The head's random layer and the
model's layers add small vectors, which make some predictions differ.
"""

import json

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
SHARE = 0.02  # Factor on a layer's contribution to the residual stream.


def add_head(folder, model, *, seed=0, share=SHARE, **fields):
    """Scale down the layers' outputs in `model`, save the model with a head, and return the head's tensors.
    `fields`: fields of config.json about the head.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(OUTPUTS) and "visual" not in name:
                weight.mul_(share)
    model.save_pretrained(folder)
    head = head_tensors(model, seed, share)
    edit(folder, lambda tensors: tensors | head)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update({"mtp_num_hidden_layers": 1} | fields)
    path.write_text(json.dumps(config))
    return head


def edit(folder, change):
    """Pass the folder's tensors to `change`, and save the tensors that it returns."""
    save_file(change(load_file(folder / FILE)), folder / FILE, {"format": "pt"})


def head_tensors(model, seed=0, share=SHARE):
    """Return the head's tensors, keyed by the names in published files. The head's layer has the weights of
    the model's full-attention layer, with permuted columns.
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = getattr(model.model, "language_model", model.model)
    number = decoder.config.layer_types.index("full_attention")
    size = decoder.config.hidden_size
    tensors = {}
    for name, weight in decoder.layers[number].state_dict().items():
        values = weight[..., torch.randperm(weight.shape[-1], generator=generator)].clone()
        tensors[f"mtp.layers.0.{name}"] = values

    def norm():
        return 0.1 * torch.randn(size, generator=generator)

    mixed = torch.randn(size, size, generator=generator) * share / size**0.5
    return tensors | {
        "mtp.fc.weight": torch.cat((torch.eye(size), mixed), 1),
        "mtp.pre_fc_norm_embedding.weight": norm(),
        "mtp.pre_fc_norm_hidden.weight": norm(),
        "mtp.norm.weight": decoder.norm.weight.detach().clone(),
    }
