"""The extension's own files: install.py and the shim, in a stand-in of the host's modules."""

from __future__ import annotations

import configparser
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.integrations.hosts.a1111 import A1111

EXTENSION = Path(__file__).parents[2] / "extension"


def load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- install.py


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install.py in a folder of its own, on a machine without sdaccel, with a pretended pip."""
    folder = tmp_path / "sdaccel ext"
    folder.mkdir()
    module = load(Path(shutil.copy(EXTENSION / "install.py", folder)), "install")
    module.commands = []
    module.report = {"install": [{"metadata": {"name": "rich", "version": "15.0"}}]}
    module.code = 0
    module.have = {"torch": "2.11.0+cu128", "some-package": "1.0", "odd": "1.0-unknown", "numpy": "1.26.2"}
    module.kept = ""

    def run(command: list[str], **options: Any) -> Any:
        module.commands.append(command)
        if "-c" in command and "pip" in command:
            module.kept = Path(command[command.index("-c") + 1]).read_text(encoding="utf-8")
        out = json.dumps(module.report) if "--dry-run" in command else ""
        return subprocess.CompletedProcess(command, module.code, out, "no network" if module.code else "")

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "installed", lambda: module.have)
    monkeypatch.setattr(module, "cuda_of_torch", lambda: "")
    return module


def test_it_installs_by_the_hosts_python_what_running_needs(install):
    install.main()
    dry, light, own = install.commands
    assert dry[0] == light[0] == own[0] == sys.executable and "--dry-run" in dry
    assert {"rich", "onnxruntime>=1.22"} < set(light) and not {"numpy", "transformers", "diffusers"} & set(light)
    assert own[-2:] == ["--no-deps", "sdaccel"] and not install.PROBLEM.exists()
    assert "torch==2.11.0+cu128" in install.kept and "odd" not in install.kept  # pip takes that for no version


def test_what_is_there_is_taken_as_it_is(install):
    install.have |= dict.fromkeys(install.RUNNING, "0.1") | {"onnxruntime-gpu": "1.20"}
    install.main()
    (own,) = install.commands
    assert own[-2:] == ["--no-deps", "sdaccel"]


@pytest.mark.parametrize(("cuda", "nvrtc"), [("12.8", "nvidia-cuda-nvrtc-cu12"), ("13.0", "nvidia-cuda-nvrtc<14")])
def test_on_a_gpu_the_packages_are_those_of_torchs_cuda(install, cuda, nvrtc):
    wanted = install.missing(install.have, cuda)
    assert nvrtc in wanted and "onnxruntime>=1.22" not in wanted
    assert any(name.startswith(f"cuda-bindings>={cuda.split('.')[0]}") for name in wanted)
    assert nvrtc not in install.missing(install.have | {nvrtc.split("<")[0]: "1"}, cuda)


def test_it_asks_nothing_when_sdaccel_is_there(install, monkeypatch):
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: object())
    install.PROBLEM.write_text("old", encoding="utf-8")
    install.main()
    assert not install.commands and not install.PROBLEM.exists()


def test_it_changes_no_package_of_the_host(install, capsys):
    install.report["install"] += [
        {"metadata": {"name": "some.Package", "version": "2.0"}},
        {"metadata": {"name": "torch", "version": "2.11.0+cu128"}},
    ]
    install.main()
    assert len(install.commands) == 1
    told = capsys.readouterr().out
    assert "some.Package 1.0 -> 2.0" in told and "torch" not in told and "sdaccel-env" in told
    assert install.PROBLEM.read_text(encoding="utf-8").strip() == told.strip()


@pytest.mark.parametrize("version", ["2.1.2+cu121", "2.9.1", "1.13.1"])
def test_a_torch_that_is_too_old_is_the_web_uis_to_renew(install, version):
    install.have["torch"] = version
    install.main()
    told = install.PROBLEM.read_text(encoding="utf-8")
    assert not install.commands and version in told and "TORCH_COMMAND" in told and "--reinstall-torch" in told


def test_the_torch_asked_for_is_the_packages(install):
    from sdaccel.doctor import PACKAGES, numbers

    assert next(numbers(package.least) for package in PACKAGES if package.name == "torch") == install.TORCH


@pytest.mark.parametrize("report", [{"install": [{}]}, [], "text"])
def test_a_pip_that_gives_no_report(install, report):
    install.report = report
    install.main()
    assert "install -U pip" in install.PROBLEM.read_text(encoding="utf-8")


def test_without_a_network_it_says_so(install):
    install.code = 1
    install.main()
    assert "no network" in install.PROBLEM.read_text(encoding="utf-8")


def test_in_a_checkout_it_installs_that(install):
    root = install.HERE.parent
    (root / "sdaccel").mkdir()
    (root / "sdaccel" / "__init__.py").touch()
    assert install.source() == str(root)


def test_of_a_package_that_is_there_twice_the_first_counts(monkeypatch):
    install = load(EXTENSION / "install.py", "install")
    found = [SimpleNamespace(metadata={"Name": "torch"}, version=version) for version in ("2.9", "2.13")]
    monkeypatch.setattr(install.metadata, "distributions", lambda: found)
    assert install.installed() == {"torch": "2.9"}


def test_metadata():
    found = configparser.ConfigParser()
    found.read(EXTENSION / "metadata.ini", encoding="utf-8")
    assert found["Extension"]["Name"] == "sdaccel"


# --- the shim


@pytest.fixture
def shim(tmp_path, monkeypatch):
    """Loads the shim into a host, in a folder of its own."""
    scripts = tmp_path / "extensions" / "sdaccel" / "scripts"
    scripts.mkdir(parents=True)
    file = Path(shutil.copy(EXTENSION / "scripts" / "sdaccel_tab.py", scripts))

    def new(**options: Any) -> tuple[Any, A1111]:
        host = A1111([])
        host.shared.opts.sdaccel_store = str(tmp_path / "store")
        package = ModuleType("modules")
        monkeypatch.setitem(sys.modules, "modules", package)
        parts = {
            name: getattr(host, name)
            for name in ("shared", "devices", "sd_unet", "sd_models", "sd_vae", "script_callbacks")
        }
        parts["scripts"] = SimpleNamespace(Script=object, AlwaysVisible="always")
        for name, part in (parts | options).items():
            setattr(package, name, part)
            monkeypatch.setitem(sys.modules, f"modules.{name}", part)
        return load(file, "sdaccel_tab"), host

    return new


def test_the_shim_registers_everything(shim):
    module, host = shim()
    assert module.problem is None and module.web.name == "A1111"
    assert {name for name, found in host.callbacks.items() if found} == {
        "app_started",
        "cfg_denoiser",
        "list_unets",
        "model_loaded",
        "script_unloaded",
        "ui_settings",
        "ui_tabs",
    }
    script = module.SdaccelScript()
    assert script.show(False) == "always" and script.ui(False) == []
    p = SimpleNamespace(batch_size=1, extra_generation_params={})
    script.process(p)
    script.postprocess_batch(p)
    script.postprocess(p, None)


def test_a_host_needs_no_library_of_the_exporter():
    """A1111 has an older transformers and no diffusers."""
    code = """
import sys
for name in ("diffusers", "transformers", "onnxscript", "peft"):
    sys.modules[name] = None
import sdaccel.integrations.webui, sdaccel.integrations.forge, sdaccel.integrations.routes
import sdaccel.ui.services, sdaccel.ui.queue, sdaccel.ui.rows
assert not {"gradio", "torch.onnx", "sdaccel.export.to_onnx"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_its_routes_answer(shim):
    starlette = pytest.importorskip("starlette.applications")
    pytest.importorskip("httpx")
    testclient = pytest.importorskip("starlette.testclient")
    module, _ = shim()
    app = starlette.Starlette()
    module.on_app_started(None, app)
    client = testclient.TestClient(app, base_url="http://localhost")
    assert client.get("/sdaccel/v1/engines").json() == {"engines": []}
    assert client.get("/sdaccel/v1/builds").json() == {"builds": []}
    wrong = client.post("/sdaccel/v1/builds", json={"colour": "red"})
    assert wrong.status_code == 400 and "no field 'colour'" in wrong.json()["error"]


def test_the_tab_opens(shim):
    pytest.importorskip("gradio")
    module, _ = shim()
    ((blocks, title, name),) = module.on_ui_tabs()
    assert (title, name) == ("sdaccel", "sdaccel")
    pages = [block.label for block in blocks.blocks.values() if type(block).__name__ in ("Tab", "TabItem")]
    assert pages == ["Now", "Engines", "Build", "Compare"]
    assert all(block.do_not_save_to_config for block in blocks.blocks.values())


def test_the_page_tells_what_ran_and_builds_what_is_made_often(shim, tmp_path, monkeypatch):
    pytest.importorskip("gradio")
    from sdaccel.integrations.host_shapes import OFTEN, WantedShapes

    module, host = shim()
    host.shared.opts.sdaccel_python = "/own/bin/python"
    services = module.services()
    assert services.queue.command[0] == "/own/bin/python"
    built: list[Any] = []
    monkeypatch.setattr(services.queue, "submit", built.append)
    for _ in range(OFTEN):
        WantedShapes(module.web.store).add(tmp_path / "a.safetensors", 832, 1216, 2, 154)
    module.web.report.ran_engine("unet", "ab" * 32, "onnxruntime", "batch=1", 12.5)
    module.web.report.fell_back("vae_decoder", "a <reason>")
    pages = []
    import sdaccel.ui.host_page as host_page

    class Page(host_page.HostPage):
        def __init__(self, *given: Any):
            super().__init__(*given)
            pages.append(self)

    monkeypatch.setattr(host_page, "HostPage", Page)
    ((blocks, _, _),) = module.on_ui_tabs()
    (page,) = pages
    changes = page.changes({})
    assert "abababababab" in changes[page.report] and "a &lt;reason&gt;" in changes[page.report]
    (text,) = [str(offer) for offer in module.web.offers()]
    assert "You made 832×1216 with a 5 times" in text

    def click(label: str) -> Any:
        button = next(b for b in blocks.blocks.values() if getattr(b, "value", None) == label)
        return next(f.fn for f in blocks.fns.values() if (button._id, "click") in f.targets)(text)

    click("Build it")
    assert (built[0].resolutions, built[0].batches, built[0].tokens) == (("832x1216",), ("1-2",), ("77-154",))
    assert built[0].components == module.web.components == ("unet", "vae_decoder", "vae_encoder")
    click("Not wanted")
    assert not module.web.offers() and "no size is chosen" in str(click("Build it")).lower()


def test_the_tab_says_what_is_missing(shim, monkeypatch):
    pytest.importorskip("gradio")
    monkeypatch.setitem(sys.modules, "sdaccel.integrations.webui", None)
    module, host = shim()
    assert isinstance(module.problem, ImportError)
    assert [name for name, found in host.callbacks.items() if found] == ["ui_tabs"]
    assert module.SdaccelScript().show(False) is False
    module.PROBLEM.write_text("<do> this", encoding="utf-8")
    ((blocks, _, _),) = module.on_ui_tabs()
    page = next(block.value for block in blocks.blocks.values() if hasattr(block, "value"))
    assert "cannot run here yet" in page and "&lt;do&gt; this" in page
    module.PROBLEM.unlink()
    ((blocks, _, _),) = module.on_ui_tabs()
    page = next(block.value for block in blocks.blocks.values() if hasattr(block, "value"))
    assert "-m pip install sdaccel" in page
