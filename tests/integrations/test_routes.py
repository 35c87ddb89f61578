"""The routes of a WebUI for engines and builds: what they answer, and to whom."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sdaccel.engine.store import Store
from sdaccel.errors import SettingError
from sdaccel.integrations.host_shapes import Offer
from sdaccel.integrations.routes import Routes, open_to_others, refusal
from sdaccel.runtime import RunReport

pytest.importorskip("httpx")
testclient = pytest.importorskip("starlette.testclient")
applications = pytest.importorskip("starlette.applications")

KEY = "ab" * 32


@dataclass
class Row:
    key: str


class Job:
    id = "1"

    def __init__(self, request: Any = None, state: str = "waiting"):
        self.request, self.state = request, state

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "request": self.request, "state": self.state}


class Queue:
    def __init__(self) -> None:
        self.submitted: list[Any] = []

    def submit(self, request: Any) -> Job:
        self.submitted.append(request)
        return Job(request)

    def jobs(self) -> list[Job]:
        return [Job()]

    def job(self, id: str) -> Job:
        if id != "1":
            raise SettingError(f"there is no build {id}.")
        return Job()

    def log(self, id: str) -> str:
        return "a line"

    def cancel(self, id: str) -> Job:
        return Job(state="cancelled")


def read(body: Any) -> Any:
    if "model" not in body:
        raise SettingError("a build request names a model.")
    return body


@pytest.fixture
def make(tmp_path):
    def new(host: str = "http://127.0.0.1:7860", **options: Any) -> Any:
        web = SimpleNamespace(
            store=Store(tmp_path / "store"),
            report=RunReport(),
            components=("unet", "vae_decoder"),
            offers=lambda: [Offer("a.safetensors", 64, 96, 1, 77, 5)],
        )
        (tmp_path / "store" / "engines" / KEY).mkdir(parents=True, exist_ok=True)
        queue, deleted = Queue(), []

        def delete(store: Any, keys: list[str]) -> int:
            deleted.extend(keys)
            return 7

        app = applications.Starlette()
        routes = Routes(
            web,
            SimpleNamespace(**options),
            queue=lambda: queue,
            request=read,
            rows=lambda store: [Row(KEY)],
            delete=delete,
        )
        routes.add_to(app)
        client = testclient.TestClient(app, base_url=host)
        client.queue, client.deleted = queue, deleted
        return client

    return new


def test_engines_and_builds(make):
    client = make()
    assert client.get("/sdaccel/v1/engines").json() == {"engines": [{"key": KEY}]}
    assert client.delete(f"/sdaccel/v1/engines/{KEY[:12]}").json() == {"freed": 7} and client.deleted == [KEY]
    assert client.delete("/sdaccel/v1/engines/ffffffff").status_code == 404
    sent = {"model": "a.safetensors", "resolutions": ["512"]}
    taken = client.post("/sdaccel/v1/builds", json=sent).json()["request"]
    assert taken == sent | {"components": ["unet", "vae_decoder"]}, "what the host runs, unless it says otherwise"
    other = sent | {"components": ["text_encoder"]}
    assert client.post("/sdaccel/v1/builds", json=other).json()["request"] == other
    assert client.get("/sdaccel/v1/builds").json()["builds"][0]["id"] == "1"
    assert client.get("/sdaccel/v1/builds/1").json()["log"] == "a line"
    assert client.delete("/sdaccel/v1/builds/1").json()["state"] == "cancelled"
    assert client.get("/sdaccel/v1/report").json()["ok"]
    (offer,) = client.get("/sdaccel/v1/offers").json()["offers"]
    assert offer["request"]["resolutions"] == ["64x96"] and "64×96" in offer["text"]


def test_bad_requests_are_answered(make):
    client = make()
    assert client.post("/sdaccel/v1/builds", json={}).json() == {"error": "a build request names a model."}
    headers = {"content-type": "application/json"}
    assert client.post("/sdaccel/v1/builds", content=b"{", headers=headers).status_code == 400
    assert client.post("/sdaccel/v1/builds", content=b" " * (2 << 20), headers=headers).status_code == 400
    assert client.get("/sdaccel/v1/builds/2").status_code == 400
    assert not client.queue.submitted


@pytest.mark.parametrize("options", [{"listen": True}, {"share": True}, {"server_name": "0.0.0.0"}, {"ngrok": "token"}])
def test_others_may_look_but_not_build(make, monkeypatch, options):
    client = make("http://10.0.0.5:7860", **options)
    assert client.get("/sdaccel/v1/engines").status_code == 200
    answers = [
        client.post("/sdaccel/v1/builds", json={"model": "a"}),
        client.delete("/sdaccel/v1/builds/1"),
        client.delete(f"/sdaccel/v1/engines/{KEY}"),
    ]
    assert {answer.status_code for answer in answers} == {403}
    assert "SDACCEL_ALLOW_REMOTE=1" in answers[0].json()["error"] and not client.queue.submitted
    monkeypatch.setenv("SDACCEL_ALLOW_REMOTE", "1")
    assert client.post("/sdaccel/v1/builds", json={"model": "a"}).status_code == 200


def test_with_a_password_those_who_know_it_may_build(make):
    client = make("http://10.0.0.5:7860", listen=True, api_auth="ann:secret,bob:other")

    def basic(text: str) -> dict[str, str]:
        return {"authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}

    assert client.get("/sdaccel/v1/engines").status_code == 401
    for wrong in ("ann:other", "ann:", "", "ann:secret,bob:other"):
        assert client.post("/sdaccel/v1/builds", json={"model": "a"}, headers=basic(wrong)).status_code == 401
    assert client.get("/sdaccel/v1/engines", headers={"authorization": "Basic %%%"}).status_code == 401
    assert client.post("/sdaccel/v1/builds", json={"model": "a"}, headers=basic("bob:other")).status_code == 200


def test_pages_of_other_sites_are_refused(make):
    client = make()
    foreign = {"origin": "https://evil.example"}
    assert client.get("/sdaccel/v1/engines", headers=foreign).status_code == 403
    assert client.post("/sdaccel/v1/builds", json={"model": "a"}, headers=foreign).status_code == 403
    text = client.post("/sdaccel/v1/builds", content=b'{"model": "a"}', headers={"content-type": "text/plain"})
    assert text.status_code == 415
    assert client.get("/sdaccel/v1/engines", headers={"origin": "http://127.0.0.1:7860"}).status_code == 200
    assert make("http://rebound.example:7860").get("/sdaccel/v1/engines").status_code == 403
    assert not client.queue.submitted


def test_which_options_open_a_host():
    assert open_to_others(SimpleNamespace()) is None
    assert open_to_others(SimpleNamespace(listen=True)) == "--listen"
    assert open_to_others(SimpleNamespace(server_name="127.0.0.1")) is None
    assert open_to_others(SimpleNamespace(nowebui=True)) == "--nowebui"  # the host then listens everywhere
    assert open_to_others(SimpleNamespace(nowebui=True, server_name="localhost")) is None
    assert open_to_others(SimpleNamespace(listen=True, gradio_auth="a:b")) is None
    assert open_to_others(SimpleNamespace(listen=True, gradio_auth="a:b"), api=True) == "--listen"
    assert "--gradio-auth" in str(refusal(SimpleNamespace(share=True)))
