"""Declares the limits that only some models have, by transformers' model type.

`make models` prints the texts in REASONS (models_page.py). The contract (hosted_contract.py) checks that the
engine refuses requests beyond these limits.
"""

# Models whose prompt tokens attend to later tokens: a prompt is computed in one step, never in chunks.
WHOLE_PROMPT = frozenset({"molmo2", "paligemma"})
# Model -> token budget for the chunk checks. These models compute an image in one step, so the budget exceeds
# the longest image.
ATOMIC = {"gemma4": 80}
# Models whose processors treat several images differently from a single image. Their test requests have one
# image.
ONE_IMAGE = frozenset({"llava_onevision"})
# Models whose processors take at most one video in a prompt, and no images together with a video.
ONE_VIDEO = frozenset({"molmo2"})
# Models whose processors add tokens around the prompt. A chat template cannot add these tokens, so token ids
# are not compared.
OWN_PROMPT = frozenset({"paligemma"})
# Models whose bfloat16 tokens are not compared with a forward over prompt and answer. PaliGemma would treat
# the answer as prompt tokens. The comparison needs routers that get all tokens, but ERNIE has separate
# routers for text tokens and image tokens.
NO_BFLOAT16 = frozenset({"ernie4_5_vl_moe", "paligemma"})
# Tokens count as tied if their logits are at most this many bfloat16 steps below the largest logit. In these
# models, transformers' own bfloat16 and float32 logits differ by as much (gemma4: up to 1.3 for logits up to
# 5, because sums in its tower cancel out).
NEAR = {"gemma4": 64, "gemma4_shared": 64}
# Model -> why the model cannot encode videos one by one, although its processor takes videos.
NO_VIDEO = {
    "kimi_k25": "transformers' get_video_features fails: it averages a video's features over time, and then "
    "splits them as if it had not"
}
# In transformers, these models' forward counts video placeholders as image placeholders, and fails for
# prompts with an image and a video. For these prompts, only log-probabilities are compared; the test computes
# them with the model's submodules.
BY_PARTS = frozenset({"glm4v", "glm4v_moe", "glm46v", "glm_ocr"})
# Models whose tokens cannot be compared with transformers for prompts with an image and a video. SmolVLM's
# processor returns only the images' or only the videos' pixels.
NOT_MIXED = BY_PARTS | {"smolvlm"}
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
    "molmo2": "all tokens of the images in a prompt see one another, so a prompt is one step: no chunks; the "
    "processor takes one video in a prompt, without images",
    "llava_onevision": "the processor treats several images of a prompt in another way than one: one "
    "image in a request",
}
