"""Declares what a model cannot do beside the others, by transformers' model type.

`make models` prints the reasons (models_page.py); the contract checks that the engine refuses.
"""

# A prompt is computed in one step, because its tokens see later ones: never in chunks.
WHOLE_PROMPT = frozenset({"paligemma"})
# An image is computed in one step: the token budget of the checks in chunks, above the longest image.
ATOMIC = {"gemma4": 80}
# Processors that treat several images of a prompt otherwise than one: one image in a request.
ONE_IMAGE = frozenset({"llava_onevision"})
# The processor itself writes tokens around the prompt, which a chat template cannot: ids are not compared.
OWN_PROMPT = frozenset({"paligemma"})
# bfloat16 is not compared: a forward over prompt and answer is another prompt (PaliGemma), or the routers of
# text and images are called with their own tokens (ERNIE).
NO_BFLOAT16 = frozenset({"ernie4_5_vl_moe", "paligemma"})
# Steps below the likeliest token that count as tied, where transformers' own bfloat16 logits are as far from
# its float32 ones (gemma4: up to 1.3 of 5, because its tower's sums cancel out).
NEAR = {"gemma4": 64, "gemma4_shared": 64}
_FAR = "its own bfloat16 logits are far from its float32 ones: tokens up to 64 steps below the likeliest pass"
_ONE_STEP = "the tokens of an image see one another, so an image is one step: none above the token budget"
REASONS = {
    "ernie4_5_vl_moe": "bfloat16 is not compared: transformers' forward over prompt and answer calls the "
    "routers of text and images with their own tokens",
    "paligemma": "all tokens of a prompt see one another, so a prompt is one step: no chunks; the chat "
    "template writes the prompt, without the tokens that the processor adds around it; bfloat16 is not "
    "compared",
    "gemma4": f"{_ONE_STEP}; {_FAR}",
    "gemma4_shared": _FAR,
    "gemma3": _ONE_STEP,
    "llava_onevision": "the processor treats several images of a prompt in another way than one: one "
    "image in a request",
}
