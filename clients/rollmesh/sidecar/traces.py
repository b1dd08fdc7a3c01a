"""The spans of agents' requests. With traces off the endpoints are not wrapped."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmesh.runtime.telemetry import current_request_id, genai, tracing


def traced(route: str, endpoint: ASGIApp) -> ASGIApp:
    """Returns an endpoint with a span around each request, if this process sends traces.

    Args:
        route: The path without the session, whose key may be in the real one.
        endpoint: Answers the requests.
    """
    return _Traced(route, endpoint) if tracing.is_on() else endpoint


class _Traced:
    """An ASGI application around another one."""

    def __init__(self, route: str, endpoint: ASGIApp) -> None:
        self._route, self._endpoint = route, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known: dict[str, Any] = {"http.request.method": "POST", "http.route": self._route}
        name = tracing.TRACEPARENT.encode()
        given = next((value for key, value in scope["headers"] if key == name), b"")
        agent = given.decode("latin-1")
        with tracing.span(f"POST {self._route}", "server", known, of_agent=agent) as span:
            if span is None:
                await self._endpoint(scope, receive, send)
                return
            status, is_complete = 499, False

            async def sent(message: Message) -> None:
                nonlocal status, is_complete
                status = message.get("status", status)
                is_complete = not message.get("more_body", True)
                await send(message)

            try:
                await self._endpoint(scope, receive, sent)
            finally:
                id_ = current_request_id()
                span.set({"http.response.status_code": status, genai.REQUEST_ID: id_})
                if status >= 500 or (status < 400 and not is_complete):
                    span.error = span.attributes.get("error.type", str(status))
