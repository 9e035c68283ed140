"""Tests which modules `parts_of` finds: the decoder, the module with the LM head, and this module's inner
model.
"""

import pytest
import torch

from mmengine.errors import ModelError
from mmengine_transformers.parts import parts_of
from tests.any_model.catalogue import IMAGE

LLAMA4_IDS = {"<|patch|>": 4, "<|image_start|>": 5, "<|image_end|>": 6}


@pytest.fixture
def llama4():
    with torch.device("meta"):
        return IMAGE["llama4"].model(LLAMA4_IDS)


@pytest.mark.timeout(60)
def test_a_class_whose_prefix_names_no_attribute_has_its_only_inner_model_as_body(llama4):
    whole, text = parts_of(llama4), parts_of(llama4.language_model)
    assert whole.owner is text.owner is llama4.language_model
    assert whole.decoder is text.decoder is llama4.language_model.model
    assert whole.body_name == text.body_name == "model"


@pytest.mark.timeout(60)
def test_a_head_behind_two_models_is_refused_by_name(llama4):
    """The module with the LM head has two inner models, and its `base_model_prefix` names neither."""
    llama4.language_model.second = llama4.vision_model
    with pytest.raises(ModelError, match="Llama4ForConditionalGeneration .* has no body 'language_model'"):
        parts_of(llama4)
