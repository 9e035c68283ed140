"""The response structs of the pooling routes: embeddings, pooled states, rankings and scores."""

import msgspec


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True):
    """`embedding` is the list of values or, with encoding_format base64, the base64 text of the values as
    little-endian float32.
    """

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage
    object: str = "list"


class PooledItem(msgspec.Struct, frozen=True):
    index: int
    data: list[float] | str
    object: str = "pooling"


class PooledList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[PooledItem]
    usage: EmbeddingUsage
    object: str = "list"


class RankedItem(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: dict[str, object] | None = None


class Ranking(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[RankedItem]
    usage: EmbeddingUsage


class ScoreItem(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class Scores(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage
    object: str = "list"
