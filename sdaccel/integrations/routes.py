"""Routes of a WebUI for engines and builds, and who may use them."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

from sdaccel import settings
from sdaccel.errors import EngineNotFound, SdaccelError, SettingError
from sdaccel.integrations.host import WebHost

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})

# --- who may build and delete -----------------------------------------------------------------------------------------


def open_to_others(options: Any, api: bool = False) -> str | None:
    """The option by which others reach the host without a password; None if they do not.

    api: through the routes, which ask for --api-auth; the pages ask for --gradio-auth.
    """
    guards = ("api_auth",) if api else ("gradio_auth", "gradio_auth_path")
    if any(getattr(options, name, None) for name in guards):
        return None
    name = getattr(options, "server_name", None)
    if name and name not in LOCAL:
        return "--server-name"
    # Without pages A1111 listens to every network unless it is told a name.
    for option in ("listen", "share", "ngrok", *(() if name else ("nowebui",))):
        if getattr(options, option, None):
            return f"--{option}"
    return None


def refusal(options: Any, api: bool = False) -> str | None:
    """Why building, deleting and importing are refused here; None if they are not."""
    how = open_to_others(options, api)
    if how is None or settings.ALLOW_REMOTE.value():
        return None
    guard = "--api-auth user:password" if api else "--gradio-auth user:password"
    return (
        f"the host runs with {how} and without a password, so building, deleting and importing are refused. "
        f"Start it with {guard}, or set SDACCEL_ALLOW_REMOTE=1."
    )


# --- routes -----------------------------------------------------------------------------------------------------------

ROUTE = "/sdaccel/v1"
LARGEST_BODY = 1 << 20


class Routes:
    """``/sdaccel/v1``: engines (GET; DELETE one), builds (GET, POST; GET and DELETE one), offers and report (GET).

    queue: the store's `BuildQueue`; request: reads a build request from JSON; rows: the store's engines as objects;
    delete: (store, keys) → bytes freed. They come from `sdaccel.ui`, which stands above this module.
    """

    def __init__(
        self,
        web: WebHost,
        options: Any,
        *,
        queue: Callable[[], Any],
        request: Callable[[Any], Any],
        rows: Callable[[Any], list[Any]],
        delete: Callable[[Any, list[str]], int],
    ):
        self.web, self.options = web, options
        self.queue, self.request, self.rows, self.delete = queue, request, rows, delete

    def add_to(self, app: Any) -> None:
        """on_app_started: ``app`` is the host's FastAPI application."""
        for path, methods, work in (
            ("/engines", ["GET"], self.list_engines),
            ("/engines/{key}", ["DELETE"], self.delete_engine),
            ("/builds", ["GET"], self.list_builds),
            ("/builds", ["POST"], self.build),
            ("/builds/{id}", ["GET"], self.one_build),
            ("/builds/{id}", ["DELETE"], self.cancel),
            ("/offers", ["GET"], self.list_offers),
            ("/report", ["GET"], self.last_report),
        ):
            app.add_route(f"{ROUTE}{path}", self._handler(work), methods=methods)

    def _handler(self, work: Callable[[Mapping[str, str], Any], Any]) -> Callable[[Any], Any]:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse

        async def handle(request: Any) -> Any:
            refused = self.refused(request.method, request.headers)
            if refused is not None:
                status, text = refused
                headers = {"WWW-Authenticate": "Basic"} if status == 401 else None
                return JSONResponse({"error": text}, status_code=status, headers=headers)
            try:
                body = await _body(request) if request.method == "POST" else None
                return JSONResponse(await run_in_threadpool(work, request.path_params, body))
            except EngineNotFound as error:
                return JSONResponse({"error": str(error)}, status_code=404)
            except SdaccelError as error:
                return JSONResponse({"error": str(error)}, status_code=400)

        return handle

    def refused(self, method: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """(status, why) for a request that is not answered: wrong password, another site's page, not allowed here."""
        credentials = getattr(self.options, "api_auth", None)
        if credentials and not _authorized(headers.get("authorization", ""), credentials):
            return 401, "wrong user or password."
        host = _host_of(headers.get("host", ""))
        origin = headers.get("origin")
        if origin and _host_of(origin.partition("://")[2]) != host:
            return 403, f"pages of {origin} may not use this."
        if open_to_others(self.options, api=True) is None and not credentials and host not in LOCAL:
            return 403, f"{host} is not this machine."  # another name that resolves to it
        if method == "GET":
            return None
        why = refusal(self.options, api=True)
        if why:
            return 403, why
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 415, "send application/json."  # which a page of another site cannot without being asked first
        return None

    # the work; each takes the path's parameters and the body

    def list_engines(self, path: Mapping[str, str], body: Any) -> Any:
        return {"engines": [vars(row) for row in self.rows(self.web.store)]}

    def delete_engine(self, path: Mapping[str, str], body: Any) -> Any:
        key = self.web.store.find(path["key"])
        return {"freed": self.delete(self.web.store, [key])}

    def list_builds(self, path: Mapping[str, str], body: Any) -> Any:
        return {"builds": [job.to_json() for job in self.queue().jobs()]}

    def build(self, path: Mapping[str, str], body: Any) -> Any:
        if isinstance(body, dict):
            body = {"components": list(self.web.components), **body}
        return self.queue().submit(self.request(body)).to_json()

    def one_build(self, path: Mapping[str, str], body: Any) -> Any:
        job = self.queue().job(path["id"])
        return {**job.to_json(), "log": self.queue().log(job.id)}

    def cancel(self, path: Mapping[str, str], body: Any) -> Any:
        return self.queue().cancel(path["id"]).to_json()

    def list_offers(self, path: Mapping[str, str], body: Any) -> Any:
        return {"offers": [{"text": str(offer), "request": offer.request()} for offer in self.web.offers()]}

    def last_report(self, path: Mapping[str, str], body: Any) -> Any:
        return self.web.report.to_json()


async def _body(request: Any) -> Any:
    """The JSON of a request, of a size that a build request has. Raises SettingError."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            raise SettingError(f"the request is larger than {LARGEST_BODY} bytes.")
        parts.append(part)
    try:
        return json.loads(b"".join(parts).decode("utf-8"))
    except (ValueError, RecursionError):
        raise SettingError("the request is no JSON.") from None


def _authorized(header: str, credentials: str) -> bool:
    """Whether a Basic header holds one of ``user:password,user:password``."""
    kind, _, encoded = header.partition(" ")
    if kind.lower() != "basic":
        return False
    try:
        given = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return False
    known = [pair.strip().encode("utf-8") for pair in credentials.split(",") if ":" in pair]
    return any([hmac.compare_digest(given, pair) for pair in known])


def _host_of(text: str) -> str:
    """The name in ``name:port`` or ``[::1]:port``."""
    if text.startswith("["):
        return text[1:].partition("]")[0].lower()
    return text.partition(":")[0].lower()


__all__ = ["ROUTE", "Routes", "open_to_others", "refusal"]
