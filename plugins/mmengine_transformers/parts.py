"""Finds a transformers model's decoder, LM head, and the module that applies the head."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from mmengine.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A transformers model's modules.

    `decoder`: computes hidden states from embeddings. `owner`: the module whose forward applies `head`. In a
    text model, this is the whole model. `body_name`: the owner's attribute for the inner model whose output
    `head` reads.
    """

    model: PreTrainedModel
    decoder: PreTrainedModel
    owner: PreTrainedModel
    body_name: str
    head: nn.Module

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()


def parts_of(model: PreTrainedModel) -> ModelParts:
    """Return a model's parts. Raises ModelError if a part is missing or ambiguous."""
    name = type(model).__name__
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{name} cannot be served: it has no language model head")
    owners = [each for each in model.modules() if any(child is head for child in each.children())]
    if len(owners) != 1 or not isinstance(owners[0], PreTrainedModel):
        raise ModelError(f"{name} cannot be served: its language model head is not a model's own module")
    owner, decoder = owners[0], model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # ModernBertDecoder's attribute `decoder` is its head.
        decoder = getattr(owner, _body_name(name, owner))
    while decoder.get_output_embeddings() is not None:
        inner = decoder.get_decoder()
        decoder = getattr(decoder, _body_name(name, decoder)) if inner is decoder else inner
    return ModelParts(model, decoder, owner, _body_name(name, owner), head)


def _body_name(name: str, owner: PreTrainedModel) -> str:
    """Return the owner's attribute for the inner model whose output the head reads. Raises ModelError.

    `name`: the architecture, for messages. The attribute is the owner's `base_model_prefix`, or else the
    attribute with the only inner model (Llama4ForCausalLM).
    """
    bodies = [each for each, child in owner.named_children() if isinstance(child, PreTrainedModel)]
    if owner.base_model_prefix in bodies:
        return owner.base_model_prefix
    if len(bodies) != 1:
        raise ModelError(
            f"{name} cannot be served: it has no body {owner.base_model_prefix!r} in front of the head"
        )
    return bodies[0]
