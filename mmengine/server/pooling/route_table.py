"""The route table for embeddings, reranking and scores, with their OpenAPI descriptions."""

from mmengine.server.http.route_records import READS, Body, Operation, RouteRecord
from mmengine.server.pooling.bodies import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from mmengine.server.pooling.routes import PoolingRoutes
from mmengine.server.pooling.schemas import Embeddings, PooledList, Ranking, Scores


def _operation(summary: str, body: Body, answer: Body) -> Operation:
    return Operation(summary, answer, "The results", (400, 404, 422, 504, *READS), body)


_RERANK = _operation("Rank documents by relevance", RerankBody, Ranking)
_SCORE = _operation("Score pairs of query and document", ScoreBody, Scores)
POOLING_ROUTES = (
    RouteRecord(
        "POST",
        "/v1/embeddings",
        PoolingRoutes.embeddings,
        _operation("Embed texts, token ids or messages", EmbeddingBody, Embeddings),
    ),
    RouteRecord(
        "POST",
        "/pooling",
        PoolingRoutes.pooling,
        _operation("Return pooled states in vLLM's format", PoolingBody, PooledList),
    ),
    *(RouteRecord("POST", path, PoolingRoutes.rerank, _RERANK) for path in ("/v1/rerank", "/rerank")),
    RouteRecord("POST", "/v2/rerank", PoolingRoutes.rerank, _RERANK),
    *(RouteRecord("POST", path, PoolingRoutes.score, _SCORE) for path in ("/score", "/v1/score")),
)
