"""The route table for routes that generate answers, with their OpenAPI descriptions."""

from mmengine.server.answers.routes import AnswerRoutes
from mmengine.server.chat.bodies import ChatBody, CompletionBody
from mmengine.server.chat.response_schemas import ChatAnswer, ChatEvent, TextAnswer, TextEvent
from mmengine.server.http.route_records import RouteRecord, Stream, answer_operation
from mmengine.server.messages.body import MessagesBody
from mmengine.server.messages.schemas import MESSAGE_EVENTS, MessageAnswer, MessageRefusal
from mmengine.server.responses.body import ResponsesBody
from mmengine.server.responses.schemas import EVENTS, Response

MESSAGES = "/v1/messages"
ANSWER_ROUTES = (
    RouteRecord(
        "POST",
        "/v1/chat/completions",
        AnswerRoutes.chat,
        answer_operation("Answer a conversation", ChatBody, ChatAnswer, Stream((ChatEvent,), "[DONE]")),
    ),
    RouteRecord(
        "POST",
        "/v1/completions",
        AnswerRoutes.completions,
        answer_operation("Continue texts", CompletionBody, TextAnswer, Stream((TextEvent,), "[DONE]")),
    ),
    RouteRecord(
        "POST",
        "/v1/responses",
        AnswerRoutes.responses,
        answer_operation("Answer a conversation of items", ResponsesBody, Response, Stream(EVENTS)),
    ),
    RouteRecord(
        "POST",
        MESSAGES,
        AnswerRoutes.messages,
        answer_operation(
            "Answer a conversation in Anthropic's format",
            MessagesBody,
            MessageAnswer,
            Stream(MESSAGE_EVENTS),
            MessageRefusal,
        ),
    ),
)
