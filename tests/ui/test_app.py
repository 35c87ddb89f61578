"""The program `sdaccel ui`: who may reach it, what it serves, what it refuses."""

from __future__ import annotations

import asyncio
import builtins
import json
import shutil
import socket
from dataclasses import replace

import httpx
import pytest

from sdaccel import cli
from sdaccel.engine.store import Store
from sdaccel.errors import SettingError
from sdaccel.ui import app as module
from sdaccel.ui.app import Guard, is_local, known_names, launch, start
from sdaccel.ui.services import Host, Services
from sdaccel.ui.tab import NATIVE


@pytest.fixture(scope="module")
def served(tiny_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    store = shutil.copytree(tiny_store.store, folder / "store")
    host = Host("sdaccel", lambda: [("tiny", str(tiny_store.model))])
    server = launch(Services(Store(store), host, folder / "images"), "127.0.0.1", 0)
    yield server
    server.close()


def test_it_answers_its_own_page(served):
    page = httpx.get(served.url)
    assert page.status_code == 200 and page.headers["x-frame-options"] == "SAMEORIGIN"
    own = served.url.rstrip("/")
    for headers in ({"Origin": own}, {"Host": own.removeprefix("http://").replace("127.0.0.1", "localhost")}):
        assert httpx.get(served.url, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:7860"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_pages_of_other_sites_are_refused_on_every_route(served, headers):
    for path in ("", "config", "gradio_api/info", "gradio_api/queue/join", "gradio_api/file=/etc/hostname"):
        for method in ("GET", "POST"):
            answer = httpx.request(method, served.url + path, headers=headers)
            assert answer.status_code == 403 and answer.text.startswith("sdaccel: refused"), (method, path)


def test_a_link_from_elsewhere_may_open_the_page(served):
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert httpx.get(served.url, headers=headers).status_code == 200


def test_files_of_the_output_folder_alone_are_served(served, tiny_store, tmp_path):
    image = served.services.output_folder() / "x.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\n")
    inside = tmp_path / "inside.txt"
    inside.write_text("secret", encoding="utf-8")
    url = served.url + "gradio_api/file="
    assert httpx.get(f"{url}{image}").content == image.read_bytes()
    beside = served.services.output_folder().parent / "beside.png"
    beside.write_bytes(b"secret")
    climbing = f"{served.services.output_folder()}/../beside.png"
    for path in ("/etc/passwd", str(inside), str(beside), climbing, str(tiny_store.model / "model_index.json")):
        answer = httpx.get(f"{url}{path}")
        assert answer.status_code in (403, 404) and b"secret" not in answer.content, path


def call(server, name, *values):
    """The first answer of an event, asked for as a program would through Gradio's own API."""
    base = f"{server.url}gradio_api/call/{name}"
    begun = httpx.post(base, json={"data": list(values)})
    assert begun.status_code == 200, begun.text
    answer = httpx.get(f"{base}/{begun.json()['event_id']}", timeout=60)
    line = next(line for line in answer.text.splitlines() if line.startswith("data: "))
    return json.dumps(json.loads(line.removeprefix("data: ")), ensure_ascii=False)


def test_the_api_routes_refuse_what_the_page_refuses(served, monkeypatch):
    names = httpx.get(served.url + "gradio_api/info").json()["named_endpoints"]
    assert {"/build", "/import_", "/cancel"} <= names.keys()
    form = (["tiny"], "", NATIVE, "", "", "", ["unet", "vae_decoder"], "fp16", False)
    local = served.services.host
    monkeypatch.setattr(served.services, "host", replace(local, remote=True))
    asked = {"build": form, "cancel": ("x",), "retry": ("x",), "forget": (), "import_": (None,), "asking": ([],)}
    for name, values in asked.items():
        assert "SDACCEL_ALLOW_REMOTE=1" in call(served, name, *values), name
    assert not served.services.queue.jobs() and len(served.services.engines()) == 4
    monkeypatch.setenv("SDACCEL_ALLOW_REMOTE", "1")
    assert "SDACCEL_ALLOW_REMOTE" not in call(served, "build", *form)


def test_bad_values_through_the_api_are_messages(served):
    for values in (("tiny", "p", "x", 64, 1, 0, 5), (None, "", 0, 0, 0, 0, 0), ("tiny", "p", 60, 64, 1, 0, 5)):
        said = call(served, "compare", *values)
        assert ("sd-notice bad" in said or "error" in said or said == "null") and "Traceback" not in said, said
    call(served, "compare", "/etc/passwd", "p", 64, 64, 1, 0, 5)
    task = served.services.tasks["compare"]
    assert task.wait(20) and task.state == "failed" and "/etc/passwd" in task.message
    assert httpx.get(served.url).status_code == 200


# ---- the guard alone


def ask(guard, headers, kind="http", path="/"):
    sent = []

    async def run():
        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request"}

        scope = {"type": kind, "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers]}
        await guard(scope, receive, send)

    asyncio.run(run())
    return sent


async def inner(scope, receive, send):
    await send({"type": "inner"})


def test_a_socket_of_another_site_is_closed():
    guard = Guard(inner, names=known_names("127.0.0.1"))
    host = ("host", "127.0.0.1:7860")
    assert ask(guard, [host, ("origin", "http://evil.example")], "websocket") == [
        {"type": "websocket.close", "code": 1008}
    ]
    assert ask(guard, [host, ("origin", "http://127.0.0.1:7860")], "websocket") == [{"type": "inner"}]
    assert ask(guard, [host, host]) != [{"type": "inner"}]
    assert ask(guard, []) != [{"type": "inner"}]


def test_files_can_be_sent_only_where_importing_is_allowed():
    for uploads in (True, False):
        guard = Guard(inner, names=known_names("127.0.0.1"), uploads=uploads)
        for path in ("/gradio_api/upload", "/upload/"):
            assert (ask(guard, [("host", "localhost")], path=path) == [{"type": "inner"}]) is uploads


def test_beyond_this_machine_addresses_and_its_own_name_are_good_hosts():
    names = known_names("0.0.0.0")
    guard = Guard(inner, names=names, addresses=True)
    for host in ("192.0.2.7:7860", "[2001:db8::1]:7860", socket.gethostname(), "localhost"):
        assert ask(guard, [("host", host)]) == [{"type": "inner"}], host
    assert ask(guard, [("host", "rebound.example")])[0]["status"] == 403
    assert ask(Guard(inner, names=known_names("127.0.0.1")), [("host", "192.0.2.7")])[0]["status"] == 403


def test_which_addresses_are_this_machine_alone():
    assert all(map(is_local, ("127.0.0.1", "localhost", "::1", "127.0.0.2")))
    assert not any(map(is_local, ("0.0.0.0", "::", "192.0.2.7", "example.org")))


# ---- starting


def test_a_port_that_is_taken_or_none_is_said(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingError, match=r"cannot be listened on.*--port"):
            start("127.0.0.1", taken.getsockname()[1], store=Store(tmp_path))
    with pytest.raises(SettingError, match="not between 0 and 65535"):
        start("127.0.0.1", 70000, store=Store(tmp_path))


def test_without_gradio_the_command_that_helps_is_named(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "gradio":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.run(["ui", "--no-browser"]) == 1
    assert 'python -m pip install "sdaccel[ui]"' in capsys.readouterr().err


def test_the_command_serves_where_it_is_told(monkeypatch, tmp_path, capsys):
    asked = {}
    monkeypatch.setattr(module, "serve", lambda *places, **options: asked.update(options, places=places))
    assert cli.run(["ui", "--port", "0", "--no-browser", "--store", str(tmp_path), "-o", str(tmp_path)]) == 0
    assert asked["places"] == ("127.0.0.1", 0) and asked["browser"] is False and asked["store"].root == tmp_path
    monkeypatch.undo()
    assert cli.run(["ui", "--models", str(tmp_path / "none"), "--no-browser"]) == 1
    assert "is no folder" in capsys.readouterr().err
    assert cli.run(["ui", "--host", "no.such.host.invalid", "--no-browser"]) == 1
    assert "cannot be listened on" in capsys.readouterr().err
