"""Computes embeddings and scores from the vectors and logits of pooling requests."""

import math

import numpy as np

from mmengine.errors import FIELD, FieldPath, InvalidRequest


def check_dimensions(dimensions: int | None, width: int) -> None:
    """Raise InvalidRequest if `dimensions` is not from 1 to `width`, the length of the model's vectors."""
    if dimensions is None:
        return
    if type(dimensions) is not int or not 1 <= dimensions <= width:
        raise InvalidRequest(
            f"{FIELD} must be an integer from 1 to {width}, the width of this model, not {dimensions!r}",
            path=FieldPath("dimensions"),
        )


def embedding(vector: np.ndarray, dimensions: int | None, normalizes: bool) -> np.ndarray:
    """Return the vector's first `dimensions` values (None: all), scaled to length 1 if `normalizes`; float32.

    The vector is cut before it is scaled, as in Matryoshka representation learning (Kusupati et al., 2022).
    """
    cut = np.asarray(vector[:dimensions], np.float32)
    if not normalizes:
        return cut
    length = float(np.linalg.norm(cut.astype(np.float64)))
    return cut / np.float32(max(length, 1e-12))


def log_odds(logits: np.ndarray) -> float:
    """Return logit(yes) - logit(no), or the only logit. `logits` is float32 [2] or [1]."""
    return float(logits[0] - logits[1]) if len(logits) == 2 else float(logits[0])


def probability(score: float) -> float:
    """Return the logistic function of a log-odds score."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine between two vectors, or 0 if a vector is zero."""
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(np.dot(one, other)) / lengths if lengths else 0.0
