"""What the tab stands on: build requests, the queue, the preflight, the list of engines; and the tab itself.

Only the pages import gradio. The process that shows them never imports the exporter: builds run in one of their own
(`worker`).
"""
