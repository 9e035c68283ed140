"""Which fields of a config.json a plugin reads, and which transformers' model does: what the second reads and
the first does not would be ignored."""

import ast
from importlib.util import find_spec
from pathlib import Path

# What no forward without training depends on, in any model.
CHANGES_NOTHING = {
    "_attn_implementation",
    "attention_dropout",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "router_aux_loss_coef",
}
CONFIGS = ("config", "text_config", "vision_config")


class Noted(dict):
    """A JSON object that notes which fields are asked for, in objects inside it too."""

    def __init__(self, values, asked):
        super().__init__((name, self._noted(value, asked)) for name, value in values.items())
        self._asked = asked

    @staticmethod
    def _noted(value, asked):
        return Noted(value, asked) if isinstance(value, dict) else value

    def get(self, name, default=None):
        self._asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self._asked.add(name)
        return super().__getitem__(name)


def read_by_transformers(model):
    """Names of fields, as its modeling file has them behind a config."""
    folder = Path(find_spec("transformers").origin).parent / "models" / model
    found = set()
    for node in ast.walk(ast.parse((folder / f"modeling_{model}.py").read_text())):
        if isinstance(node, ast.Attribute):
            of = getattr(node.value, "id", getattr(node.value, "attr", ""))
            found |= {node.attr} if of in CONFIGS else set()
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            of, name = node.args[0], node.args[1]
            if getattr(of, "id", getattr(of, "attr", "")) in CONFIGS and isinstance(name, ast.Constant):
                found.add(name.value)
    assert len(found) > 10, "the file is written in another way now"
    return found


def ignored(model, asked):
    """Fields that transformers' model reads, and whoever asked for `asked` did not."""
    return read_by_transformers(model) - asked - CHANGES_NOTHING - set(CONFIGS)
