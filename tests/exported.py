"""Each tiny model of `tests.export.tiny` as a graph beside random weights, exported once in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from sdaccel.engine.weights import TensorPlace
from sdaccel.export.to_onnx import bind_weights, export_graph
from tests.export import tiny


@dataclass(frozen=True)
class Exported:
    """One tiny model's graph, beside random weights."""

    component: str
    config: dict[str, Any]
    graph: onnx.ModelProto
    folder: Path
    layout: dict[str, TensorPlace]
    run: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

    @property
    def weights(self) -> Path:
        return self.folder / "weights.safetensors"


def session_runner(path: Path) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}

    return run


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Callable[[str], Exported]:
    """Each model of `tiny.MODELS`, exported once in the whole run."""
    torch.set_num_threads(1)
    done: dict[str, Exported] = {}

    def get(name: str) -> Exported:
        if name not in done:
            component, config = tiny.MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            graph = export_graph(component, config)
            tiny.write_weights(component, config, folder / "weights.safetensors")
            layout = tiny.places(folder / "weights.safetensors")
            onnx.save(bind_weights(graph, layout), folder / "graph.onnx")
            done[name] = Exported(component, config, graph, folder, layout, session_runner(folder / "graph.onnx"))
        return done[name]

    return get
