"""Small graphs written as text, run by ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from sdaccel.graph.fusions import noops

HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>'


def model(text: str, **weights: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(HEADER + text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def run(graph: ir.Model, **inputs: np.ndarray) -> np.ndarray:
    return run_all(graph, **inputs)[0]


def run_all(graph: ir.Model, **inputs: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(graph).SerializeToString(), options)
    return session.run(None, inputs)


def ops(graph: ir.Model) -> list[str]:
    """The operators left once what nobody reads any more is gone."""
    noops.fuse(graph)
    return [node.op_type for node in graph.graph]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)
