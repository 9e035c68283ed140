"""Tests the check that a model's masks match its layers' attention."""

from dataclasses import replace

import pytest
import torch

from mmengine.errors import ModelError
from mmengine.models.spec import LayerAttention
from mmengine_transformers.masks import check_masks
from mmengine_transformers.parts import parts_of
from tests.any_model.catalogue import TEXT

WINDOW = 12  # The sliding window in every second layer of the tiny Gemma 2.
LAYERS = tuple(LayerAttention(number, window=0 if number % 2 else WINDOW) for number in range(4))


@pytest.fixture(scope="module")
def parts():
    return parts_of(TEXT["gemma2"].model({}).eval())


def test_the_masks_of_a_model_are_its_layers(parts):
    """The check passes for the right layers, and leaves no replaced `forward` in the model."""
    with torch.inference_mode():
        check_masks(parts, LAYERS, torch.device("cpu"))
        assert "forward" not in vars(parts.decoder.layers[0])


@pytest.mark.parametrize("wrong", [{"window": WINDOW - 1}, {"window": 0}, {"chunk": WINDOW}])
def test_a_layer_that_would_see_other_keys_is_refused(parts, wrong):
    layers = (*LAYERS[:2], replace(LAYERS[2], **wrong), LAYERS[3])
    with torch.inference_mode(), pytest.raises(ModelError, match="layer 2 sees other keys"):
        check_masks(parts, layers, torch.device("cpu"))
