"""The HTTP server: OpenAI's and Anthropic's APIs in front of an engine. Requires the extra `serve`. No
package outside `mmengine.server` depends on HTTP.

In this package, a call is an HTTP request, a request is the engine's unit of work, and an answer is the
model's output for a request.

The subpackages, from the lowest layer to the highest: http, storage, transport, chat, calls, messages,
responses, live, answers, pooling, batches, sessions, app, lifecycle. Two subpackages are independent: `bench`
is a load generator, and `debug` serves the debugger's page.
"""
