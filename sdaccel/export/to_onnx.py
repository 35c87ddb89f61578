"""A component's torch module → a weightless ONNX graph.

The module is built under fake tensors, so no weights are loaded, and traced by torch.export with dynamic batch, sides
and tokens. The graph's initializers carry the checkpoint's own tensor names and point into a ``weights.safetensors``
that lies beside the graph once an engine is made of it; `bind_weights` fills in where. One graph serves every
checkpoint of its architecture: `architecture_hash` is its name in the store.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch

from sdaccel.engine.manifest import TensorSpec
from sdaccel.errors import Cancelled, ExportError
from sdaccel.export.components import ComponentSpec, architecture_fields, component_spec, kind_of
from sdaccel.float32 import without_tf32

if TYPE_CHECKING:
    from sdaccel.engine.store import Draft, Entry, Store

EXPORT_FORMAT = 1
OPSET = 23
WEIGHTS_FILE = "weights.safetensors"
GRAPH_FILE = "graph.onnx"
MAX_ABS = 1e-4

# The default dtype, log handlers and warning filters are the process's: one thread at a time may borrow them.
_EXPORTING = threading.Lock()

Progress = Callable[[str, float], None]
Runner = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def architecture_hash(component: str, config: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over all that shapes the graph: config fields, export format, opset, the libraries that make it."""
    import diffusers
    import onnxscript
    import transformers

    identity = {
        "component": kind_of(component),
        "config": architecture_fields(component, config),
        "format": EXPORT_FORMAT,
        "opset": OPSET,
        "versions": {
            "torch": torch.__version__.split("+")[0],
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
            "onnxscript": onnxscript.__version__,
        },
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def export_graph(component: str, config: Mapping[str, Any], *, progress: Progress | None = None) -> onnx.ModelProto:
    """The weightless graph of ``component``, opset 23, float32.

    Initializers of the model's weights are external tensors in ``weights.safetensors`` without a place yet; constants
    of the graph's own stay inline. ``progress`` gets a stage and the fraction done. Raises ExportError with what the
    exporter said; an exception raised by ``progress`` (Cancelled, KeyboardInterrupt) passes through unchanged.
    """
    report = progress or (lambda stage, fraction: None)
    spec = component_spec(component, config)
    stopped: list[BaseException] = []
    report(f"{component}: building the module", 0.0)
    with _EXPORTING, _plain_torch(), _quiet() as said:
        try:
            program = _trace(spec, report)
            report(f"{component}: converting to ONNX", 0.4)
            stopped = _follow(program, lambda done: report(f"{component}: converting to ONNX", 0.4 + 0.4 * done))
            model = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=[tensor.name for tensor in spec.inputs],
                output_names=[tensor.name for tensor in spec.outputs],
                optimize=False,
                verbose=False,
            ).model
            parameters = set(program.state_dict)
            del program
            report(f"{component}: cleaning the graph", 0.8)
            _name_weights(model, spec, parameters)
            _name_axes(model, spec)
            for step, total in _clean(model):
                report(f"{component}: cleaning the graph", 0.8 + 0.2 * step / total)
            _place_weights(model)
            _declare_optional(model, spec)
            proto = ir.serde.serialize_model(model)
        except (Cancelled, ExportError):
            raise
        except Exception as error:
            if stopped:  # the exporter wraps what is raised inside it
                raise stopped[0] from None
            details = "\n".join(said[-20:])
            raise ExportError(f"{component} cannot be exported: {error}\n{details}".rstrip()) from error
    report(f"{component}: exported", 1.0)
    return proto


# --- torch → ONNX -----------------------------------------------------------------------------------------------------


def _trace(spec: ComponentSpec, report: Progress) -> torch.export.ExportedProgram:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        module = spec.build_module()
        # An optional input is traced as what it is when left out: one zero for each axis that broadcasts.
        arguments = tuple(
            _default(tensor) if tensor.optional else _sample(tensor, spec.example) for tensor in spec.inputs
        )
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple(
        {} if tensor.optional else {axis: dynamic for axis, dim in enumerate(tensor.shape) if isinstance(dim, str)}
        for tensor in spec.inputs
    )
    total = sum(1 for _ in module.modules())
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1
        report(f"{spec.name}: tracing", min(0.02 + 0.38 * seen / total, 0.4))

    hooks = [part.register_forward_pre_hook(count) for part in module.modules()]
    try:
        return torch.export.export(module, arguments, dynamic_shapes=(shapes,), strict=False)
    finally:
        for hook in hooks:
            hook.remove()


# Measured: 5.6 to 7.4 on tiny models of every kind.
_OPS_PER_NODE = 6


def _follow(program: torch.export.ExportedProgram, report: Callable[[float], None]) -> list[BaseException]:
    """Reports the share done while ``program`` is converted, which torch itself does not: that takes minutes for SDXL.

    Conversion runs each node a few times on the program's fake tensors; every such operation is a chance to report.
    Returns the list that will hold what ``report`` raised, so that it is known whatever it gets wrapped in.
    """
    from torch._guards import detect_fake_mode

    raised: list[BaseException] = []
    mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"])
    if mode is None:
        return raised
    total = _OPS_PER_NODE * len(program.graph.nodes)
    dispatch = mode.dispatch
    seen = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if raised:
            raise raised[0]
        if seen % 16 == 0:
            try:
                report(min(seen / total, 1.0))
            except BaseException as error:
                raised.append(error)
                raise
        return dispatch(*args, **kwargs)

    # This one mode belongs to this one program; its class stays as it is.
    mode.dispatch = watched
    return raised


def _sample(tensor: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
    return torch.zeros(shape, dtype=torch.int64 if tensor.dtype == "int64" else torch.float32)


def _default(tensor: TensorSpec) -> torch.Tensor:
    return torch.zeros(_default_shape(tensor))


def _default_shape(tensor: TensorSpec) -> tuple[int, ...]:
    return tuple(1 if isinstance(dim, str) else dim for dim in tensor.shape)


def _name_weights(model: ir.Model, spec: ComponentSpec, parameters: set[str]) -> None:
    """Gives weights the checkpoint's names and takes their (fake) values away, so that no pass can fold them."""
    initializers = model.graph.initializers
    for name in list(initializers):
        value = initializers[name]
        if name not in parameters:
            if _is_fake(value.const_value):
                raise ExportError(f"{spec.name} cannot be exported: its constant {name} has no value without weights.")
            continue
        value.const_value = None
        value.name = spec.weight_name(name)
        value.metadata_props[_WEIGHT] = "1"


_WEIGHT = "sdaccel.weight"


def _weights(model: ir.Model) -> list[ir.Value]:
    return [value for value in model.graph.initializers.values() if _WEIGHT in value.metadata_props]


def _is_fake(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(getattr(tensor, "raw", None), FakeTensor)


def _name_axes(model: ir.Model, spec: ComponentSpec) -> None:
    """Replaces torch's symbols (s53, ...) by the axis names of the spec, in every shape."""
    names: dict[str, str] = {}
    for tensor, value in zip(spec.inputs, model.graph.inputs, strict=True):
        if tensor.optional or value.shape is None:
            continue
        for wanted, found in zip(tensor.shape, value.shape, strict=True):
            if isinstance(wanted, str) != isinstance(found, ir.SymbolicDim):
                raise ExportError(f"{spec.name}: {tensor.name} was traced as {value.shape}, not as {tensor.shape}.")
            if isinstance(found, ir.SymbolicDim):
                names[str(found.value)] = str(wanted)
    symbol = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    for value in _values(model.graph):
        if value.shape is not None:
            value.shape = ir.Shape(
                symbol.sub(lambda match: names[match[0]], str(dim.value))
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None
                else dim
                for dim in value.shape
            )
    for tensor, value in zip(spec.outputs, model.graph.outputs, strict=True):
        value.shape = ir.Shape(tensor.shape)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


_TURNS = 3


def _clean(model: ir.Model) -> Iterator[tuple[int, int]]:
    """Folds all that no input reaches, turns sequences into Split, drops what does nothing. Exact; weights stay.

    Yields (steps done, steps in all) between its passes.
    """
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules import common as rules

    exact = (
        rules.add_0_rule,
        rules.sub_0_rule,
        rules.mul_by_1_rule,
        rules.div_by_1_rule,
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.no_op_transpose_rule,
        rules.transpose_transpose_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.squeeze_reshape_1d_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.normalize_pad_format_conv_rule,
        rules.fuse_pad_into_conv_rule,
    )
    common.InlinePass()(model)
    for turn in range(_TURNS):
        changed = optimizer.fold_constants_ir(model, onnx_shape_inference=True).modified
        yield 3 * turn + 1, 3 * _TURNS
        rewriter.rewrite(model, pattern_rewrite_rules=exact)
        yield 3 * turn + 2, 3 * _TURNS
        changed |= bool(common.IdentityEliminationPass()(model).modified)
        changed |= bool(common.CommonSubexpressionEliminationPass()(model).modified)
        common.RemoveUnusedNodesPass()(model)
        yield 3 * turn + 3, 3 * _TURNS
        if not changed:
            break
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)
    weights = {id(value) for value in _weights(model)}
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.clear()
        if id(value) in weights:
            value.metadata_props[_WEIGHT] = "1"


def _place_weights(model: ir.Model) -> None:
    for value in _weights(model):
        if value.dtype is None or value.shape is None or value.name is None:
            raise ExportError(f"weight {value.name} was exported without a type or shape.")
        value.metadata_props.clear()
        value.const_value = ir.ExternalTensor(
            WEIGHTS_FILE, None, None, value.dtype, shape=ir.Shape(value.shape), name=value.name
        )


def _declare_optional(model: ir.Model, spec: ComponentSpec) -> None:
    """Gives each optional input its default, a zero that broadcasts, and frees its declared dimensions."""
    for tensor, value in zip(spec.inputs, model.graph.inputs, strict=True):
        if tensor.optional:
            value.const_value = ir.tensor(torch.zeros(_default_shape(tensor)).numpy(), name=tensor.name)
            value.shape = ir.Shape(tensor.shape)
            model.graph.register_initializer(value)


# --- silence ----------------------------------------------------------------------------------------------------------


_TALKATIVE = ("torch", "onnxscript", "onnx_ir", "diffusers", "transformers")


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    """Collects the warnings and log lines of the exporting libraries instead of showing them."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Collect(logging.WARNING)
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    # torch gives some of its child loggers handlers of their own.
    loggers += [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and logger.handlers
    ]
    before = [(logger, logger.handlers[:], logger.propagate) for logger in loggers]
    try:
        for logger in loggers:
            logger.handlers[:] = [handler]
            logger.propagate = False
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_, **__: said.append(str(message))
            yield said
    finally:
        for logger, handlers, propagate in before:
            logger.handlers[:] = handlers
            logger.propagate = propagate


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """float32 on the CPU, whatever default type, device, autocast or grad mode the host has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            without_tf32(),
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else contextlib.nullcontext(),
            torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


# --- the graph and its weights ----------------------------------------------------------------------------------------


def bind_weights(model: onnx.ModelProto, layout: Mapping[str, Any], stored: str | None = None) -> onnx.ModelProto:
    """A copy of ``model`` whose external initializers point at their places in one weights entry.

    ``layout`` maps names to places with ``offset`` and ``nbytes`` (bytes in the file), ``shape`` and ``dtype``.
    ``stored``: the weights' type there, where the backend computes in another than the graph says (F16, BF16).
    Raises ExportError naming the weight that is missing or has another shape or type.
    """
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    for tensor in bound.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = layout.get(tensor.name)
        if place is None:
            raise ExportError(f"the checkpoint has no weight {tensor.name}, which its config asks for.")
        if tuple(place.shape) != tuple(tensor.dims):
            raise ExportError(
                f"weight {tensor.name} is {tuple(place.shape)} in the checkpoint, {tuple(tensor.dims)} in its config."
            )
        if _ONNX_TYPES.get(place.dtype) != tensor.data_type and place.dtype != stored:
            wanted = onnx.TensorProto.DataType.Name(tensor.data_type)
            raise ExportError(f"weight {tensor.name} is stored as {place.dtype}, but the graph computes in {wanted}.")
        del tensor.external_data[:]
        for key, value in (("location", WEIGHTS_FILE), ("offset", place.offset), ("length", place.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
    return bound


_ONNX_TYPES = {
    "F32": onnx.TensorProto.FLOAT,
    "F16": onnx.TensorProto.FLOAT16,
    "BF16": onnx.TensorProto.BFLOAT16,
}


def weight_names(model: onnx.ModelProto) -> list[str]:
    """The state_dict names of the weights that ``model`` uses."""
    return [t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]


def describe_graph(model: onnx.ModelProto) -> dict[str, Any]:
    """Counts for manifests and people: nodes by operator, weights, transposes of weights that backends may fold."""
    weights = set(weight_names(model))
    nodes = model.graph.node
    return {
        "nodes": len(nodes),
        "ops": dict(sorted(Counter(node.op_type for node in nodes).items())),
        "weights": len(weights),
        "weight_transposes": sum(node.op_type == "Transpose" and node.input[0] in weights for node in nodes),
    }


def publish_graph(
    store: Store, component: str, config: Mapping[str, Any], *, progress: Progress | None = None
) -> Entry:
    """The store's graph of this architecture, exported only if no checkpoint of it came before.

    Entry of kind ``graphs``, key `architecture_hash`, file ``graph.onnx``; the manifest holds component, inputs,
    outputs, counts and seconds. Raises ExportError, StoreError.
    """

    def fill(draft: Draft) -> dict[str, Any]:
        start = time.monotonic()
        spec = component_spec(component, config)
        model = export_graph(component, config, progress=progress)
        with draft.create(GRAPH_FILE) as file:
            file.write(model.SerializeToString(deterministic=True))
        return {
            "component": spec.name,
            "inputs": [tensor.to_json() for tensor in spec.inputs],
            "outputs": [tensor.to_json() for tensor in spec.outputs],
            "opset": OPSET,
            "seconds": round(time.monotonic() - start, 3),
            **describe_graph(model),
        }

    return store.publish("graphs", architecture_hash(component, config), fill)


# --- graph against torch ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckResult:
    """One comparison: ``error`` is the largest absolute difference over max(1, largest absolute reference value)."""

    shape: dict[str, int]
    optional: bool
    output: str
    error: float


def check_graph(
    run: Runner,
    component: str,
    config: Mapping[str, Any],
    weights_path: Path,
    layout: Mapping[str, Any],
    *,
    shapes: Sequence[Mapping[str, int]] | None = None,
    optional: bool = True,
    limit: float = MAX_ABS,
    device: str = "cpu",
) -> list[CheckResult]:
    """Runs ``run`` and torch on the same random inputs at several small shapes (`ComponentSpec.shapes` by default).

    torch goes first, in float32 on weights mapped from ``weights_path`` (copied only if stored in half precision), and
    has let go of them when ``run`` is called for the first time: the two never hold the weights together. At the last
    shape the optional inputs are given too, unless ``optional`` is False. Returns the largest error of each shape;
    raises ExportError naming shape, output and error above ``limit`` (or where either is NaN). ``device``: where torch
    computes.
    """
    spec = component_spec(component, config)
    cases = []
    sizes = list(shapes or spec.shapes)
    with _EXPORTING, _plain_torch():
        module = load_module(spec, weights_path, layout, device)
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # no buffer is read
        for index, shape in enumerate(sizes):
            given = optional and index == len(sizes) - 1 and any(tensor.optional for tensor in spec.inputs)
            inputs = spec.random_inputs(shape, seed=index, optional=given)
            with torch.no_grad():
                given_all = (inputs[t.name] if t.name in inputs else _default(t) for t in spec.inputs)
                expected = [value.cpu() for value in module(*(tensor.to(device) for tensor in given_all))]
            cases.append((dict(shape), given, inputs, expected))
        del module
    gc.collect()
    return [
        _compare(spec, shape, given, expected, run(inputs), limit=limit) for shape, given, inputs, expected in cases
    ]


def _compare(
    spec: ComponentSpec,
    shape: dict[str, int],
    given: bool,
    expected: Sequence[torch.Tensor],
    found: Mapping[str, torch.Tensor],
    *,
    limit: float,
) -> CheckResult:
    where = " ".join(f"{axis}={size}" for axis, size in shape.items()) + (" with optional inputs" if given else "")
    worst = CheckResult(shape, given, "", 0.0)
    for tensor, reference in zip(spec.outputs, expected, strict=True):
        if tensor.name not in found:
            raise ExportError(f"{spec.name} gave no output {tensor.name} at {where}.")
        value = found[tensor.name].float().cpu()
        if value.shape != reference.shape:
            raise ExportError(
                f"{spec.name} gave {tensor.name} as {tuple(value.shape)} at {where}; torch {tuple(reference.shape)}."
            )
        error = float((value - reference).abs().max() / max(1.0, float(reference.abs().max())))
        if not error <= limit:
            raise ExportError(
                f"{spec.name} differs from torch by {error:.2e} in {tensor.name} at {where} (<= {limit:g})."
            )
        if error >= worst.error:
            worst = CheckResult(shape, given, tensor.name, error)
    return worst


def load_module(
    spec: ComponentSpec, weights_path: Path, layout: Mapping[str, Any], device: str = "cpu"
) -> torch.nn.Module:
    """The torch module in float32 on weights mapped from the file, or copied to ``device``; buffers stay on the CPU."""
    with torch.device("meta"):
        module = spec.build_module()
    size = Path(weights_path).stat().st_size
    data = torch.from_file(str(weights_path), shared=False, size=size, dtype=torch.uint8)
    state = {}
    for name, _ in module.named_parameters():
        weight = spec.weight_name(name)
        if weight not in layout:
            raise ExportError(f"the weights of {spec.source} lack {weight}.")
        place = layout[weight]
        stored = data[place.offset : place.offset + place.nbytes].view(_DTYPES[place.dtype]).view(tuple(place.shape))
        state[name] = stored.to(device).float()
    module.load_state_dict(state, strict=False, assign=True)
    return module.requires_grad_(False)


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
