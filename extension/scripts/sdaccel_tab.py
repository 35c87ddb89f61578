"""The extension in A1111 and Forge: connects the host's callbacks with sdaccel. No logic of its own.

Whatever is missing, the host starts, and the tab says what to do.
"""

import functools
import html
import importlib.util
import sys
from pathlib import Path

from modules import script_callbacks, scripts, shared

FORGE = importlib.util.find_spec("modules_forge") is not None
PROBLEM = Path(__file__).resolve().parents[1] / "problem.txt"  # written by install.py

web = problem = None
try:
    if FORGE:
        from sdaccel.integrations.forge import Forge as Web
    else:
        from sdaccel.integrations.webui import WebUI as Web
    web = Web()
except Exception as error:  # noqa: BLE001 - whatever it is, the host starts
    problem = error


def how_to_fix(error):
    """A page about what is missing and the command that brings it."""
    import gradio as gr

    try:
        text = PROBLEM.read_text(encoding="utf-8")
    except OSError:
        text = f'Run: "{sys.executable}" -m pip install sdaccel\nThen start the web UI again.'
    reason = html.escape(f"{type(error).__name__}: {error}")
    with gr.Blocks(analytics_enabled=False) as blocks:
        gr.HTML(f"<h3>sdaccel cannot run here yet</h3><p>{reason}</p><pre>{html.escape(text)}</pre>")
    return blocks


def services():
    """What stands behind the tab and the routes: one for the process, through every reload of the page."""
    from sdaccel.integrations.host import kept
    from sdaccel.integrations.routes import open_to_others
    from sdaccel.ui.services import Host, Services

    found = kept("services", str(web.store.root), lambda: Services(web.store))
    found.work_by(web.option("sdaccel_python", ""))
    found.host = Host(web.name, web.models, open_to_others(shared.cmd_opts) is not None, web.components)
    return found


def on_ui_tabs():
    try:
        if web is None:
            raise problem
        from sdaccel.ui.host_page import HostPage
        from sdaccel.ui.tab import build_tab

        found = services()
        page = functools.partial(HostPage, web)
        blocks = build_tab(found, found.host, [("Now", page)])
    except Exception as error:  # noqa: BLE001 - the page says what it is
        blocks = how_to_fix(error)
    return [(blocks, "sdaccel", "sdaccel")]


def on_app_started(demo, app):
    from sdaccel.integrations.routes import Routes
    from sdaccel.ui.requests import BuildRequest
    from sdaccel.ui.rows import delete, engine_rows

    Routes(
        web,
        shared.cmd_opts,
        queue=lambda: services().queue,
        request=BuildRequest.from_json,
        rows=engine_rows,
        delete=delete,
    ).add_to(app)


script_callbacks.on_ui_tabs(on_ui_tabs)
if web is not None:
    script_callbacks.on_app_started(on_app_started)
    script_callbacks.on_ui_settings(web.settings)
    script_callbacks.on_model_loaded(web.loaded_callback)
    script_callbacks.on_script_unloaded(web.unload)
    script_callbacks.on_cfg_denoiser(web.before_step)
    if not FORGE:
        script_callbacks.on_list_unets(web.list_unets)


class SdaccelScript(scripts.Script):
    create_group = False

    def title(self):
        return "sdaccel"

    def show(self, is_img2img):
        return scripts.AlwaysVisible if web is not None else False

    def ui(self, is_img2img):
        return []

    def process(self, p, *args):
        web.begin(p)

    def process_before_every_sampling(self, p, *args, **kwargs):
        if FORGE:
            web.before_sampling(p)

    def postprocess_batch(self, p, *args, **kwargs):
        web.describe(p)

    def postprocess(self, p, processed, *args):
        web.finish(processed)
