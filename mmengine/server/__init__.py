"""The HTTP server: OpenAI's and Anthropic's APIs in front of an engine. Requires the extra `serve`. No
package outside `mmengine.server` depends on HTTP.

In this package, a call is an HTTP request, a request is what the engine runs, and an answer is the output
that the model generates for a request.

The subpackages, from the lowest layer to the highest: http, storage, transport, chat, calls, messages,
responses, live, answers, batches, sessions, app, lifecycle. `bench` is a load generator that imports none of
these subpackages.
"""
