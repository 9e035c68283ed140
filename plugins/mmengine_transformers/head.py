"""Computes logits with the model's own forward, including its soft caps and scales."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from mmengine_transformers.parts import ModelParts


class _GivenOutput(BaseModelOutputWithPast):
    """A base model's output with only hidden states. All other fields are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, place: Any) -> Any:
        return self.last_hidden_state if place in (0, "last_hidden_state") else None


class _GivenBody(nn.Module):
    """A stub for the base model (`body`). Returns `inputs_embeds` as hidden states."""

    @property
    def decoder(self) -> "_GivenBody":
        """Return this stub, because OPT's forward calls the decoder in its base model."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _GivenOutput:
        return _GivenOutput(last_hidden_state=inputs_embeds)


class Head:
    """Applies the model's own LM head. During a call, a stub replaces the base model."""

    def __init__(self, parts: ModelParts) -> None:
        self._owner, self._body_name, self._given = parts.owner, parts.body_name, _GivenBody()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [s, vocab_size], for hidden states [s, hidden]."""
        modules = self._owner._modules
        body, modules[self._body_name] = modules[self._body_name], self._given
        try:
            return self._owner(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
        finally:
            modules[self._body_name] = body
