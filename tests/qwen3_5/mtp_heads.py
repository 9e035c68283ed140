"""Adds random multi-token-prediction heads to tiny hybrid checkpoints.

The layers of the model and of the head add only small vectors to a token's embedding. Therefore, model and
head often predict the same next token.
"""

import json

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
SHARE = 0.02  # Factor on each layer's output.


def add_head(folder, model, *, seed=0, share=SHARE, **fields):
    """Scale down the layers' outputs in `model`, and save the model with a head. Return the head's tensors.
    `fields`: more fields for config.json.
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
    """Replace the folder's tensors by `change(tensors)`."""
    save_file(change(load_file(folder / FILE)), folder / FILE, {"format": "pt"})


def head_tensors(model, seed=0, share=SHARE):
    """Return the head's tensors under their names in published files. The head's layer is the model's
    full-attention layer with permuted columns.
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
