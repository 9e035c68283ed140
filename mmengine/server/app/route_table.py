"""The table of all HTTP routes with their OpenAPI descriptions. Most routes are declared in the packages that
handle them.
"""

from mmengine.server.answers.route_table import ANSWER_ROUTES, MESSAGES
from mmengine.server.app.adapter_routes import LOAD, UNLOAD, AdapterDone, AdapterRoutes, LoadBody, UnloadBody
from mmengine.server.app.service_routes import ServiceRoutes
from mmengine.server.batches.route_table import BATCH_ROUTES, FILE_ROUTES
from mmengine.server.chat.bodies import DetokenizeBody, TokenizeBody
from mmengine.server.chat.response_schemas import Alive, Health, ModelCard, Models, Text, Tokens, Version
from mmengine.server.http.route_records import NO_BODY, OVERLOADED, READS, Operation, RouteRecord
from mmengine.server.messages.body import CountBody
from mmengine.server.messages.counting import MessageCounts
from mmengine.server.messages.schemas import InputTokenCount, MessageRefusal
from mmengine.server.pooling.route_table import POOLING_ROUTES
from mmengine.server.responses.route_table import RESPONSE_ROUTES
from mmengine.server.sessions.route_table import SESSION_ROUTES

_READY = Operation("Check readiness", Health, "Ready", (405, 431, 500), not_ready=Health, is_public=True)
COUNT_ROUTES = (
    RouteRecord(
        "POST",
        f"{MESSAGES}/count_tokens",
        MessageCounts.count,
        Operation(
            "Count the tokens of a conversation",
            InputTokenCount,
            "The number of tokens",
            (400, 404, OVERLOADED, *READS),
            CountBody,
            refusal=MessageRefusal,
        ),
    ),
)
ADAPTER_ROUTES = (
    RouteRecord(
        "POST",
        LOAD,
        AdapterRoutes.load,
        Operation("Load a LoRA adapter", AdapterDone, "Loaded", (400, 403, *READS), LoadBody),
    ),
    RouteRecord(
        "POST",
        UNLOAD,
        AdapterRoutes.unload,
        Operation("Unload a LoRA adapter", AdapterDone, "Unloaded", (400, 403, 404, *READS), UnloadBody),
    ),
)
HEALTH_ROUTES = (
    RouteRecord("GET", "/health", ServiceRoutes.ready, _READY),
    RouteRecord("GET", "/health/ready", ServiceRoutes.ready, _READY),
    RouteRecord(
        "GET",
        "/health/live",
        ServiceRoutes.live,
        Operation("Check that the server is not stuck", Alive, "Alive", (405, 431, 500, 503), is_public=True),
    ),
)
SERVICE_ROUTES = (
    *HEALTH_ROUTES,
    RouteRecord(
        "POST",
        "/tokenize",
        ServiceRoutes.tokenize,
        Operation("Tokenize a prompt or messages", Tokens, "The tokens", (400, 404, *READS), TokenizeBody),
    ),
    RouteRecord(
        "POST",
        "/detokenize",
        ServiceRoutes.detokenize,
        Operation("Detokenize token ids", Text, "The text", (400, 404, *READS), DetokenizeBody),
    ),
    RouteRecord(
        "GET",
        "/v1/models",
        ServiceRoutes.models,
        Operation("List the served models", Models, "The models", NO_BODY),
    ),
    RouteRecord(
        "GET",
        "/v1/models/{name:path}",
        ServiceRoutes.model,
        Operation("Get a served model", ModelCard, "The model", NO_BODY),
    ),
    RouteRecord(
        "GET",
        "/metrics",
        ServiceRoutes.metrics,
        Operation("Get metrics in Prometheus' text format", "text/plain", "The metrics", NO_BODY),
    ),
    RouteRecord(
        "GET",
        "/version",
        ServiceRoutes.version,
        Operation("Get the version", Version, "The version", NO_BODY),
    ),
)
STORED_ROUTES = (*RESPONSE_ROUTES, *FILE_ROUTES, *BATCH_ROUTES)  # Require a log.
ALL_ROUTES = (
    *ANSWER_ROUTES,
    *COUNT_ROUTES,
    *POOLING_ROUTES,
    *ADAPTER_ROUTES,
    *SERVICE_ROUTES,
    *SESSION_ROUTES,
    *STORED_ROUTES,
)
