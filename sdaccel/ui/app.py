"""`sdaccel ui`: the pages as a program of their own, for this machine's user.

It listens on 127.0.0.1. A page of another site cannot reach it through the user's browser: `Guard` turns away requests
whose Host is not ours (DNS rebinding) or whose Origin is another. Bound to other addresses it draws, compares and
lists, but refuses to build, delete and import unless SDACCEL_ALLOW_REMOTE=1.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sdaccel.engine.store import Store
from sdaccel.errors import SettingError
from sdaccel.resources import expanded
from sdaccel.ui.services import Host, Services, models_in

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "::1")


def is_local(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def known_names(host: str) -> frozenset[str]:
    """The names under which a server that listens on ``host`` is meant. Others are refused, except IP addresses where
    it listens beyond this machine: a page can point a name of its own here, but no address."""
    names = {*LOCAL, host.lower()}
    if not is_local(host):
        own = socket.gethostname().lower()
        names |= {own, own.partition(".")[0], f"{own.partition('.')[0]}.local"}
    return frozenset(names)


class Guard:
    """ASGI middleware: refuses what comes from another site's page, and being framed by one."""

    def __init__(self, app: Any, *, names: Collection[str], addresses: bool = False, uploads: bool = True):
        self.app = app
        self.names = names
        self.addresses = addresses
        """Whether any IP address is a good Host."""
        self.uploads = uploads
        """Whether files may be sent: only an import needs them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        reason = self.refusal(_headers(scope))
        if reason is None and not self.uploads and scope["path"].rstrip("/").endswith("/upload"):
            reason = "others can reach this page without a password"
        if reason is None:
            await self.app(scope, receive, _unframed(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = f"sdaccel: refused, because {reason}.\n".encode()
            head = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": head})
            await send({"type": "http.response.body", "body": body})

    def refusal(self, headers: dict[str, list[str]]) -> str | None:
        """Why a request is turned away; None if it is not."""
        hosts = headers.get("host", [])
        if len(hosts) != 1:
            return "it names no host, or several"
        host = _host(f"//{hosts[0]}")
        if host is None or not self._ours(host[0]):
            return f"the host {hosts[0]!r:.100} is not this server"
        for origin in headers.get("origin", []):
            if _host(origin) != host:
                return f"it comes from {origin!r:.100}, another site"
        site, mode = (headers.get(name, [""])[0] for name in ("sec-fetch-site", "sec-fetch-mode"))
        if site in ("cross-site", "same-site") and mode != "navigate":
            return "it comes from another site"
        return None

    def _ours(self, name: str) -> bool:
        if name in self.names:
            return True
        if self.addresses:
            with suppress(ValueError):
                ipaddress.ip_address(name)
                return True
        return False


def _headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


def _host(url: str) -> tuple[str, int | None] | None:
    """(name, port) of an URL; None where it has none, as the origin "null"."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or parts.username is not None:
        return None
    return name.rstrip("."), port or {"http": 80, "https": 443}.get(parts.scheme)


def _unframed(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            extra = [(b"x-frame-options", b"SAMEORIGIN"), (b"referrer-policy", b"same-origin")]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending


# ---- the program


def build_app(services: Services) -> Any:
    """All pages as one `gr.Blocks`."""
    from sdaccel.ui.generate_page import GeneratePage
    from sdaccel.ui.tab import build_tab

    blocks = build_tab(services, first=[("Generate", GeneratePage)])
    blocks.title = "sdaccel"
    return blocks


class Server:
    """The pages, being served. ``url`` is where."""

    def __init__(self, services: Services, blocks: Any, url: str):
        self.services, self.blocks, self.url = services, blocks, url

    def close(self) -> None:
        """Stops what is under way, and the server."""
        self.services.close()
        self.blocks.close(verbose=False)


def start(
    host: str = "127.0.0.1",
    port: int = 7860,
    *,
    store: Store | None = None,
    models: Path | None = None,
    output: Path | None = None,
    browser: bool = False,
) -> Server:
    """Serves the pages from a thread. See `serve`."""
    try:
        import gradio as gr
    except ImportError:
        raise SettingError(
            "the pages need Gradio, which is not installed.", hint='Run: python -m pip install "sdaccel[ui]"'
        ) from None
    if int(gr.__version__.partition(".")[0]) < 6:
        raise SettingError(
            f"the pages need Gradio 6; this is {gr.__version__}.", hint='Run: python -m pip install "gradio>=6,<7"'
        )
    if models is not None and not expanded(models).is_dir():
        raise SettingError(f"{models} is no folder.", hint="--models names a folder of checkpoints.")
    _free(host, port)
    folder = expanded(models) if models is not None else None
    served = Host("sdaccel", lambda: models_in(folder) if folder else [], remote=not is_local(host))
    services = Services(store or Store(), served, output)
    try:
        return launch(services, host, port, browser)
    except BaseException:
        services.close()
        raise


def launch(services: Services, host: str, port: int, browser: bool = False) -> Server:
    """Serves the pages of ``services``; port 0: any that is free from 7860 on."""
    import gradio as gr
    from starlette.middleware import Middleware

    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    blocks = build_app(services)
    blocks.queue(default_concurrency_limit=None, max_size=256)
    guard = Middleware(Guard, names=known_names(host), addresses=services.host.remote, uploads=services.host.allowed)
    blocks.launch(
        server_name=host,
        server_port=port or None,
        share=False,
        inbrowser=browser,
        prevent_thread_lock=True,
        quiet=True,
        allowed_paths=[str(services.output_folder())],
        footer_links=[],
        app_kwargs={"middleware": [guard], "docs_url": None, "redoc_url": None, "openapi_url": None},
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        max_file_size=64 * 2**20,
        css=PAGE_STYLE,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]).set(
            body_text_color_subdued="*neutral_500",
            block_info_text_color="*neutral_500",
            input_placeholder_color="*neutral_500",
        ),
    )
    shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
    return Server(services, blocks, f"http://{shown}:{blocks.server_port}/")


PAGE_STYLE = """
.sd-gallery img { object-fit: contain !important; }
.sd-gallery .grid-wrap { max-height: none !important; min-height: 0 !important; height: auto !important; }
@media (max-width: 760px) {
  .sd-page { flex-direction: column; } .sd-page > .sd-form { display: contents !important; }
  .sd-page > .sd-result { order: 1; width: 100%; } .sd-settings { order: 2; }
}
"""


def serve(host: str = "127.0.0.1", port: int = 7860, **options: Any) -> None:
    """Serves the pages until Ctrl-C.

    options: store, models (a folder of checkpoints to list), output (where images go), browser (open one).
    Raises SettingError where Gradio is missing or the address cannot be used.
    """
    server = start(host, port, **options)
    print(f"sdaccel: {server.url} (Ctrl-C ends it)", flush=True)
    if server.services.host.remote:
        may = "may" if server.services.host.allowed else "may not"
        print(f"Others can reach it without a password. They {may} build, delete and import.", flush=True)
    try:
        ended = threading.Event()
        while not ended.wait(1.0):  # on Windows an endless wait would not hear Ctrl-C
            pass
    finally:
        server.close()


def _free(host: str, port: int) -> None:
    """Raises SettingError where the address is taken or is none of this machine's."""
    if not 0 <= port <= 65535:
        raise SettingError(f"the port {port} is not between 0 and 65535.")
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            if os.name != "nt":
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        raise SettingError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}.", hint="Choose another with --port."
        ) from None


__all__ = ["Guard", "Server", "build_app", "known_names", "serve", "start"]
