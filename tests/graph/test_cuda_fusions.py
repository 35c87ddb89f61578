"""Each fusion for CUDA: it fires and ONNX Runtime gives the same result through the function bodies, or it says why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from sdaccel.graph import ops as ours
from sdaccel.graph.fusions import (
    constants,
    conv,
    group_norm,
    layer_norm,
    linear,
    multi_linear,
    noops,
    skip_concat,
    timestep_embedding,
    tokens,
    upsample_conv,
)
from sdaccel.graph.match import Outcome
from tests.graph.small import model, normal, run_all
from tests.tolerances import EXPORT_MAX_ABS

Fuse = Callable[[ir.Model], Outcome]


def fused(graph: ir.Model, *fuse: Fuse, fires: int = 1, **inputs: np.ndarray) -> list[ir.Node]:
    """The nodes left after ``fuse``, the last of which has fired ``fires`` times, on outputs that have not changed."""
    expected = run_all(graph, **inputs)
    outcomes = [each(graph) for each in fuse]
    assert outcomes[-1].fired == fires
    noops.fuse(graph)
    ours.define(graph)
    onnx.checker.check_model(ir.to_proto(graph), full_check=True)
    for found, wanted in zip(run_all(graph, **inputs), expected, strict=True):
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= EXPORT_MAX_ABS
    return list(graph.graph)


def form(step: ir.Node) -> str:
    return f"{step.op_type} {step.overload}".rstrip()


def only(steps: list[ir.Node]) -> ir.Node:
    (step,) = steps
    return step


def names(step: ir.Node) -> list[str]:
    return ["" if value is None else value.name for value in step.inputs]


def refusals(graph: ir.Model, fuse: Fuse) -> list[str]:
    outcome = fuse(graph)
    return sorted(outcome.refused)


# --- linear -----------------------------------------------------------------------------------------------------------

TOKENS = "float[b, s, 24] x"
PRODUCT = "t = Transpose<perm = [1, 0]>(w) v = MatMul(x, t)"


@pytest.mark.parametrize(
    ("tail", "expected", "attribute"),
    [
        ("y = Add(v, c)", "Linear bias", "none"),
        ("y = Identity(v)", "Linear", "none"),
        ("p = Add(c, v) y = Add(r, p)", "Linear bias+residual", "none"),
        ("y = Add(v, r)", "Linear residual", "none"),
        ("g = Sigmoid(v) y = Mul(v, g)", "Linear silu", "silu"),
        ("p = Add(v, c) g = Sigmoid(p) y = Mul(g, p)", "Linear bias+silu", "silu"),
        ("p = Add(v, c) q = Add(p, r) g = Sigmoid(q) y = Mul(q, g)", "Linear bias+residual+silu", "silu"),
        ("p = Add(v, c) y = Gelu(p)", "Linear bias+gelu", "gelu"),
        ("p = Add(v, c) k = Mul(p, quick) g = Sigmoid(k) y = Mul(p, g)", "Linear bias+quick_gelu", "quick_gelu"),
    ],
)
def test_linear(tail, expected, attribute):
    graph = model(
        f"g ({TOKENS}, float[b, s, 10] r) => (float[b, s, 10] y) <float quick = {{1.702}}> {{ {PRODUCT} {tail} }}",
        w=normal(10, 24),
        c=normal(10),
    )
    noops.fuse(graph)
    step = only(fused(graph, linear.fuse, x=normal(2, 7, 24), r=normal(2, 7, 10)))
    assert form(step) == expected
    assert step.attributes["activation"].as_string() == attribute
    assert names(step)[:2] == ["x", "w"]


@pytest.mark.parametrize("axis", [-1, 2])
def test_linear_with_geglu(axis):
    graph = model(
        f"g ({TOKENS}) => (float[b, s, 5] y)"
        f"{{ {PRODUCT} p = Add(v, c) a, z = Split<axis = {axis}, num_outputs = 2>(p) o = Gelu(z) y = Mul(a, o) }}",
        w=normal(10, 24),
        c=normal(10),
    )
    assert form(only(fused(graph, linear.fuse, x=normal(2, 7, 24)))) == "Linear bias+geglu"


@pytest.mark.parametrize(
    ("tail", "left"),
    [
        ("a, z = Split<axis = -1, num_outputs = 2>(v) o = Gelu(a) y = Mul(o, z)", ["Linear", "Split", "Gelu", "Mul"]),
        ('y = Gelu<approximate = "tanh">(v)', ["Linear", "Gelu"]),
        ("k = Mul(v, other) g = Sigmoid(k) y = Mul(v, g)", ["Linear", "Mul", "Sigmoid", "Mul"]),
        ("g = Sigmoid(v) p = Mul(v, g) y = Add(p, v)", ["Linear", "Sigmoid", "Mul", "Add"]),
    ],
)
def test_what_only_looks_like_an_activation_stays(tail, left):
    """The gate is the second half; tanh is another function; 1.5 is no 1.702; the value is read by others too."""
    graph = model(
        f"g ({TOKENS}) => (y) <float other = {{1.5}}> {{ {PRODUCT} {tail} }}".replace("(y)", "(float[b, s, n] y)"),
        w=normal(10, 24),
    )
    assert [step.op_type for step in fused(graph, linear.fuse, x=normal(2, 7, 24))] == left


@pytest.mark.parametrize(("bias", "expected"), [("", "Linear"), (", c", "Linear bias")])
def test_linear_of_a_gemm(bias, expected):
    graph = model(
        f"g (float[b, 24] x) => (float[b, 10] y) {{ y = Gemm<transB = 1>(x, w{bias}) }}", w=normal(10, 24), c=normal(10)
    )
    noops.fuse(graph)
    assert form(only(fused(graph, linear.fuse, x=normal(3, 24)))) == expected


def test_linear_takes_in_what_is_added_to_its_image():
    graph = model(
        f"""g (float[b, n, 24] x, float[b, 10, 3, 4] r) => (float[b, 10, 3, 4] y) <int64[4] size = {{0, 3, 4, 10}}>
        {{ {PRODUCT} p = Add(v, c) q = Reshape(p, size) i = Transpose<perm = [0, 3, 1, 2]>(q) y = Add(i, r) }}""",
        w=normal(10, 24),
        c=normal(10),
    )
    steps = fused(graph, tokens.fuse, linear.fuse, x=normal(2, 12, 24), r=normal(2, 10, 3, 4))
    assert [form(step) for step in steps] == ["ToTokens", "Linear bias+residual", "ToImage"]
    assert names(steps[2])[1] == "r"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = MatMul(x, z)", "the second factor is not a transposed weight"),
        ("t = Transpose<perm = [1, 0]>(z) y = MatMul(x, t)", "the second factor is not a transposed weight"),
        ("y = Gemm<transB = 1, alpha = 2.0>(x, w)", "a Gemm that does more than a linear"),
        ("y = Gemm(x, z)", "a Gemm that does more than a linear"),
        ("y = Gemm<transB = 1>(x, w, m)", "what a Gemm adds is no bias"),
        ("v = Gemm<transB = 1>(x, w) y = Add(v, m)", "what is added has another shape"),
        ("v = Gemm<transB = 1>(x, w) y = Add(v, v)", None),
        ("v = Gemm<transB = 1>(x, w) y = Add(v, later)", "what is added is an optional input"),
    ],
)
def test_linear_says_why_not(body, reason):
    graph = model(
        f"g (float[b, 6] x, float[6, 6] z, float[b, 6] later) => (float[b, 6] y) {{ {body} }}",
        w=normal(6, 6),
        m=normal(1, 6),
        later=np.zeros((1, 6), np.float32),
    )
    assert refusals(graph, linear.fuse) == ([reason] if reason else [])


# --- many linears of one input ----------------------------------------------------------------------------------------


def test_linears_of_one_input_become_one():
    products = " ".join(f"t{i} = Transpose<perm = [1, 0]>(w{i}) y{i} = MatMul(x, t{i})" for i in range(3))
    graph = model(
        f"g ({TOKENS}) => (float[b, s, 5] y0, float[b, s, 6] y1, float[b, s, 7] y2) {{ {products} }}",
        **{f"w{i}": normal(5 + i, 24) for i in range(3)},
    )
    step = only(fused(graph, linear.fuse, multi_linear.fuse, x=normal(2, 7, 24)))
    assert (form(step), names(step)) == ("MultiLinear 3", ["x", "w0", "w1", "w2"])
    assert [value.name for value in step.outputs] == ["y0", "y1", "y2"]


def test_linears_with_and_without_bias_are_two_groups():
    products = " ".join(f"y{i} = Gemm<transB = 1>(x, w{i}{', c' if i % 2 else ''})" for i in range(4))
    graph = model(
        f"g (float[b, 24] x) => ({', '.join(f'float[b, 5] y{i}' for i in range(4))}) {{ {products} }}",
        c=normal(5),
        **{f"w{i}": normal(5, 24) + i for i in range(4)},
    )
    steps = fused(graph, linear.fuse, multi_linear.fuse, fires=2, x=normal(2, 24))
    assert [form(step) for step in steps] == ["MultiLinear 2", "MultiLinear 2+bias"]
    assert names(steps[1]) == ["x", "w1", "w3", "c", "c"]


def test_a_linear_that_does_more_is_not_joined():
    graph = model(
        """g (float[b, 24] x) => (float[b, 5] y, float[b, 5] z)
        { y = Gemm<transB = 1>(x, w) v = Gemm<transB = 1>(x, w) z = Gelu(v) }""",
        w=normal(5, 24),
    )
    linear.fuse(graph)
    assert refusals(graph, multi_linear.fuse) == [
        "it has a residual or an activation",
        "no other linear like it reads its input",
    ]


# --- norms ------------------------------------------------------------------------------------------------------------

NORM = "GroupNormalization<num_groups = 2, epsilon = 0.001>"
SILU = "g = Sigmoid(n) y = Mul(n, g)"
WIDE = "wide = Unsqueeze(e, axes) moved = Add(x, wide)"


def norm_model(body: str) -> ir.Model:
    return model(
        f"""g (float[b, 8, h, w] x, float[b, 8] e) => (float[b, 8, h, w] y)
        <int64[2] axes = {{2, 3}}, int64[4] shape = {{0, 8, 1, 1}}, float[b, 8, 1, 1] wide, float[b, 8, h, w] moved>
        {{ {body} }}""",
        scale=normal(8),
        bias=normal(8) + 1,
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"y = {NORM}(x, scale, bias)", "GroupNorm"),
        (f"n = {NORM}(x, scale, bias) {SILU}", "GroupNorm silu"),
        (f"{WIDE} y = {NORM}(moved, scale, bias)", "GroupNorm add"),
        (f"{WIDE} n = {NORM}(moved, scale, bias) {SILU}", "GroupNorm add+silu"),
        (f"wide = Reshape(e, shape) moved = Add(wide, x) y = {NORM}(moved, scale, bias)", "GroupNorm add"),
    ],
)
def test_group_norm(body, expected):
    graph = norm_model(body)
    noops.fuse(graph)
    step = only(fused(graph, group_norm.fuse, x=3 * normal(2, 8, 5, 3) + 1, e=normal(2, 8)))
    assert form(step) == expected
    assert step.attributes["epsilon"].as_float() == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            f"{WIDE} n = {NORM}(moved, scale, bias) y = Add(n, moved)",
            "the sum with the time embedding is read elsewhere",
        ),
        (f"n = {NORM}(e, scale, bias) z = Unsqueeze(n, axes) y = Add(x, z)", "it is not of an image"),
    ],
)
def test_group_norm_says_why_not(body, reason):
    assert refusals(norm_model(body), group_norm.fuse) == [reason]


LAYER_NORM = "LayerNormalization<axis = -1, epsilon = 0.001>"


def layer_norm_model(body: str, outputs: str = "float[b, s, 24] y") -> ir.Model:
    return model(
        f"g ({TOKENS}, float[b, s, 24] r, float[1, s, 24] p, float[b, s, 24] later) => ({outputs}) {{ {body} }}",
        scale=normal(24),
        bias=normal(24) + 1,
        later=np.zeros((1, 1, 24), np.float32),
    )


@pytest.mark.parametrize("sum_is_read", [False, True])
def test_layer_norm_takes_in_the_sum_before_it(sum_is_read):
    outputs = "float[b, s, 24] y" + (", float[b, s, 24] z, float[b, s, 24] total" if sum_is_read else "")
    body = f"total = Add(x, r) {'z = Gelu(total)' if sum_is_read else ''} y = {LAYER_NORM}(total, scale, bias)"
    values = {"x": normal(2, 7, 24), "r": normal(2, 8, 24)[:, :7], "p": normal(1, 7, 24)}
    steps = fused(layer_norm_model(body, outputs), layer_norm.fuse, **values)
    assert [form(step) for step in steps] == ["LayerNorm residual", *["Gelu"] * sum_is_read]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"total = Add(x, p) y = {LAYER_NORM}(total, scale, bias)", "the sum before it broadcasts"),
        (f"total = Add(x, later) y = {LAYER_NORM}(total, scale, bias)", "what is added is an optional input"),
        (
            "y = LayerNormalization<axis = 1>(x, scale, bias)",
            "it is not over the last axis, or lacks a bias, or gives its statistics",
        ),
        (
            "y = LayerNormalization<axis = -1>(x, scale)",
            "it is not over the last axis, or lacks a bias, or gives its statistics",
        ),
    ],
)
def test_layer_norm_says_why_not(body, reason):
    assert refusals(layer_norm_model(body), layer_norm.fuse) == [reason]


# --- convolutions -----------------------------------------------------------------------------------------------------

IMAGE = "float[b, 8, h, w] x"
THREE = "Conv<pads = [1, 1, 1, 1]>"


def conv_model(body: str, values: str = "", output: str = "float[b, 6, h, w] y") -> ir.Model:
    return model(
        f"""g ({IMAGE}, float[b, 6, h, w] r, float[i, j, k, l] later) => ({output})
        <float[b, 6, h, w] v, float[b, 6, h, w] k {values}> {{ {body} }}""",
        w3=normal(6, 8, 3, 3),
        w1=normal(6, 8, 1, 1),
        c=normal(6),
        grouped=normal(6, 4, 3, 3),
        later=np.zeros((1, 1, 1, 1), np.float32),
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"y = {THREE}(x, w3, c)", ["Conv bias"]),
        ("y = Conv(x, w1)", ["Conv"]),
        (f"v = {THREE}(x, w3, c) y = Add(r, v)", ["Conv bias+residual"]),
        (f"v = {THREE}(x, w3, c) g = Sigmoid(v) y = Mul(v, g)", ["Conv bias+silu"]),
        (f"v = {THREE}(x, w3, c) k = Conv(x, w1, c) y = Add(k, v)", ["Conv bias", "Conv bias+residual"]),
        (f"v = {THREE}(x, w3, c) k = Add(r, v) y = Add(k, later)", ["Conv bias+residual", "Add"]),
        (f"v = {THREE}(x, w3, c) k = Add(v, later) y = Add(k, r)", ["Conv bias", "Add", "Add"]),
    ],
)
def test_conv(body, expected):
    graph = conv_model(body)
    noops.fuse(graph)
    inputs = {"x": normal(2, 8, 5, 3), "r": normal(2, 6, 5, 3)}
    steps = fused(graph, conv.fuse, fires=sum("Conv" in each for each in expected), **inputs)
    assert [form(step) for step in steps] == expected


def test_the_sum_of_two_convolutions_goes_to_the_3x3():
    graph = conv_model(f"v = {THREE}(x, w3, c) k = Conv(x, w1, c) y = Add(k, v)")
    conv.fuse(graph)
    takes = only([step for step in graph.graph if step.overload == "bias+residual"])
    assert names(takes) == ["x", "w3", "c", "k"]


def test_conv_keeps_strides_and_pads_of_the_vae_encoder():
    graph = model(
        f"g ({IMAGE}) => (float[b, 6, p, q] y) {{ y = Conv<strides = [2, 2], pads = [0, 0, 1, 1]>(x, w) }}",
        w=normal(6, 8, 3, 3),
    )
    step = only(fused(graph, conv.fuse, x=normal(1, 8, 5, 6)))
    assert tuple(step.attributes["strides"].as_ints()) == (2, 2)
    assert tuple(step.attributes["pads"].as_ints()) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Conv<group = 2, pads = [1, 1, 1, 1]>(x, grouped)", "it has groups or is dilated"),
        ("y = Conv<dilations = [2, 2], pads = [2, 2, 2, 2]>(x, w3)", "it has groups or is dilated"),
        ('y = Conv<auto_pad = "SAME_UPPER">(x, w3)', "it pads by itself"),
        (f"z = Identity(w3) y = {THREE}(x, z)", "its weight is computed, or it is not of images"),
        (f"v = {THREE}(x, w3) y = Add(v, later)", "what is added is an optional input"),
        (f"v = {THREE}(x, w3) z = Unsqueeze(c, ax) y = Add(v, z)", "what is added has another shape"),
    ],
)
def test_conv_says_why_not(body, reason):
    assert refusals(conv_model(body, ", int64[2] ax = {1, 2}"), conv.fuse) == [reason]


RESIZE = 'Resize<mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric">'


def upsample_model(body: str) -> ir.Model:
    return model(
        f"""g ({IMAGE}, float[b, 2, p, q] skip) => (float[b, 6, p, q] y)
        <float[4] twice = {{1.0, 1.0, 2.0, 2.0}}, float[4] thrice = {{1.0, 1.0, 3.0, 3.0}}, float[b, 8, p, q] l>
        {{ {body} }}""",
        w3=normal(6, 8, 3, 3),
        w1=normal(6, 8, 1, 1),
        c=normal(6),
    )


SIZES = "front = Shape<end = 2>(x) back = Shape<start = 2>(skip) sizes = Concat<axis = 0>(front, back)"


@pytest.mark.parametrize("size", [(10, 6), (9, 5), (10, 5), (7, 13)])
def test_upsampling_to_the_size_of_a_skip(size):
    """Even, odd, mixed, and a size that is not about twice, where the source row is not row // 2."""
    graph = upsample_model(f"{SIZES} l = {RESIZE}(x, , , sizes) y = {THREE}(l, w3, c)")
    step = only(fused(graph, upsample_conv.fuse, x=normal(2, 8, 5, 3), skip=normal(2, 2, *size)))
    assert (form(step), names(step)) == ("UpsampleConv bias+like", ["x", "w3", "c", "skip"])


def test_upsampling_to_twice_the_size():
    graph = upsample_model(f"l = {RESIZE}(x, , twice) y = {THREE}(l, w3)")
    step = only(fused(graph, upsample_conv.fuse, x=normal(2, 8, 5, 3), skip=normal(2, 2, 1, 1)))
    assert (form(step), names(step)) == ("UpsampleConv", ["x", "w3"])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"l = {RESIZE}(x, , thrice) y = {THREE}(l, w3)", "it does not double height and width"),
        ('l = Resize<mode = "linear">(x, , twice) y = Conv(l, w3)', "it is not the nearest pixel at or before"),
        (f"l = {RESIZE}(x, , twice) y = Conv(l, w1)", "no 3×3 convolution alone reads it"),
        (
            f"l = {RESIZE}(x, , twice) z = {THREE}(l, w3) k = Conv(l, w1) y = Add(z, k)",
            "no 3×3 convolution alone reads it",
        ),
        (f"l = {RESIZE}(x, , twice) y = Conv(l, w3)", "the convolution after it changes the size"),
        (f"{SIZES} d = Concat<axis = 0>(sizes) l = {RESIZE}(x, , , d) y = {THREE}(l, w3)", None),
    ],
)
def test_upsampling_says_why_not(body, reason):
    assert refusals(upsample_model(body), upsample_conv.fuse) == ([reason] if reason else [])


def test_upsampling_to_a_size_that_nothing_has():
    graph = model(
        f"""g ({IMAGE}, int64[4] sizes) => (float[b, 6, p, q] y) <float[b, 8, p, q] l>
        {{ l = {RESIZE}(x, , , sizes) y = {THREE}(l, w) }}""",
        w=normal(6, 8, 3, 3),
    )
    assert refusals(graph, upsample_conv.fuse) == ["no other value has its height and width"]


# --- skips ------------------------------------------------------------------------------------------------------------


def concat_model(body: str) -> ir.Model:
    return model(
        f"""g (float[b, 5, h, w] x, float[b, 3, h, w] z) => (float[b, 8, h, w] y)
        <float[b, 8, h, w] j, float[b, 8, h, w] s, float[b, 8, h, w] k> {{ {body} }}""",
        scale=normal(8),
        bias=normal(8),
        w1=normal(8, 8, 1, 1),
        w3=normal(8, 8, 3, 3),
    )


def test_a_skip_is_read_in_two_parts():
    """A group of the norm lies across the seam: groups of four channels, parts of five and three."""
    body = f"j = Concat<axis = 1>(x, z) n = {NORM}(j, scale, bias) {SILU.replace('y =', 'a =')}"
    graph = concat_model(f"{body} k = {THREE}(a, w3) s = Conv(j, w1, bias) y = Add(s, k)")
    inputs = {"x": normal(2, 5, 4, 3), "z": normal(2, 3, 4, 3)}
    steps = fused(graph, group_norm.fuse, conv.fuse, skip_concat.fuse, **inputs)
    assert [form(step) for step in steps] == ["GroupNorm x2+silu", "Conv bias+x2", "Conv residual"]
    assert names(steps[0]) == ["x", "scale", "bias", "z"]
    assert names(steps[1]) == ["x", "w1", "bias", "", "z"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"j = Concat<axis = 1>(x, z) y = {THREE}(j, w3)", "a reader cannot take two inputs"),
        ("j = Concat<axis = 1>(x, z) k = Conv(j, w1) y = Add(j, k)", "a reader cannot take two inputs"),
        ("y = Concat<axis = 1>(x, z)", "a reader cannot take two inputs"),
        ("j = Concat<axis = 1>(z, z, z) y = Conv(x, w1)", "it joins other than two parts by channels"),
        ("j = Concat<axis = 2>(x, x) y = Conv(x, w1)", "it joins other than two parts by channels"),
    ],
)
def test_skips_say_why_not(body, reason):
    graph = concat_model(body)
    conv.fuse(graph)
    assert refusals(graph, skip_concat.fuse) == [reason]


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "l = Transpose<perm = [0, 2, 3, 1]>(x) y = Reshape(l, flat_last)",
        "l = Reshape(x, flat_first) y = Transpose<perm = [0, 2, 1]>(l)",
    ],
)
def test_image_to_tokens(body):
    graph = model(
        f"""g ({IMAGE}) => (float[b, n, 8] y)
        <int64[3] flat_last = {{0, -1, 8}}, int64[3] flat_first = {{0, 8, -1}}> {{ {body} }}"""
    )
    assert form(only(fused(graph, tokens.fuse, x=normal(2, 8, 3, 5)))) == "ToTokens"


def test_a_norm_of_flat_channels_is_a_norm_of_the_image():
    graph = model(
        f"""g ({IMAGE}) => (float[b, n, 8] y) <int64[3] flat = {{0, 8, -1}}, float[b, 8, n] l, float[b, 8, n] n>
        {{ l = Reshape(x, flat) n = {NORM}(l, scale, bias) y = Transpose<perm = [0, 2, 1]>(n) }}""",
        scale=normal(8),
        bias=normal(8),
    )
    steps = fused(graph, tokens.fuse, group_norm.fuse, x=normal(2, 8, 3, 5))
    assert [form(step) for step in steps] == ["GroupNorm", "ToTokens"]


def image_model(body: str, like: str) -> ir.Model:
    return model(
        f"""g (float[b, n, 8] x, {like}) => (float[b, 8, 3, 5] y)
        <int64[4] last = {{0, 3, 5, 8}}, int64[4] first = {{0, 8, 3, 5}}> {{ {body} }}"""
    )


TO_IMAGE = [
    "l = Reshape(x, last) y = Transpose<perm = [0, 3, 1, 2]>(l)",
    "k = Transpose<perm = [0, 2, 1]>(x) y = Reshape(k, first)",
]


@pytest.mark.parametrize("body", TO_IMAGE)
def test_tokens_to_image(body):
    graph = image_model(body, "float[b, 4, 3, 5] sample")
    noops.fuse(graph)
    step = only(fused(graph, tokens.fuse, x=normal(2, 15, 8), sample=normal(2, 4, 3, 5)))
    assert (form(step), names(step)) == ("ToImage", ["x", "sample"])


@pytest.mark.parametrize("like", ["float[b, 4, 3, w] sample", "float[other, 4, 3, 5] sample"])
def test_an_image_of_a_size_that_nothing_has_stays(like):
    assert refusals(image_model(TO_IMAGE[0], like), tokens.fuse) == ["no other value has the image's height and width"]


def test_the_size_is_read_from_what_is_needed_later():
    graph = model(
        """g (float[b, n, 8] x, float[b, 2, p, q] z, int64[4] size) => (float[b, 8, h, w] y)
        <float[b, 2, h, w] early, float[b, 2, h, w] kept, float[b, 2, h, w] last, float[b, h, w, 8] l, int64[1] a = {1}>
        { early = Reshape(z, size) kept = Relu(early) last = Sigmoid(early)
          l = Reshape(x, size) i = Transpose<perm = [0, 3, 1, 2]>(l)
          m = ReduceMean(kept, a) y = Add(i, m) }"""
    )
    assert tokens.fuse(graph).fired == 1
    (image,) = [step for step in graph.graph if step.op_type == "ToImage"]
    assert names(image) == ["x", "kept"]


# --- time -------------------------------------------------------------------------------------------------------------

ANGLES = "c = Unsqueeze(t, one) a = Mul(c, f) s = Sin(a) k = Cos(a)"
FLIP = "p = Slice(j, five, end, one, one) q = Slice(j, zero, five, one, one) y = Concat<axis = -1>"


def time_model(body: str) -> ir.Model:
    return model(
        f"""g (float[b] t, float[b, 5] z) => (float[b, 10] y)
        <int64[1] one = {{1}}, int64[1] zero = {{0}}, int64[1] five = {{5}}, int64[1] end = {{9223372036854775807}}>
        {{ {body} }}""",
        f=np.abs(normal(1, 5)),
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{ANGLES} y = Concat<axis = -1>(s, k)", "TimestepEmbedding"),
        (f"{ANGLES} j = Concat<axis = -1>(s, k) {FLIP}(p, q)", "TimestepEmbedding flip"),
    ],
)
def test_timestep_embedding(body, expected):
    graph = time_model(body)
    noops.fuse(graph)
    step = only(fused(graph, timestep_embedding.fuse, t=np.array([0, 1, 999], np.float32), z=normal(3, 5)))
    assert form(step) == expected
    assert bool(step.attributes["flip_sin_to_cos"].as_int()) == expected.endswith("flip")
    assert names(step) == ["t", "f"]


def test_halves_in_their_own_order_are_not_flipped():
    graph = time_model(f"{ANGLES} j = Concat<axis = -1>(s, k) {FLIP}(q, p)")
    steps = fused(graph, timestep_embedding.fuse, t=np.array([7], np.float32), z=normal(1, 5))
    assert [form(step) for step in steps] == ["TimestepEmbedding", "Slice", "Slice", "Concat"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("s = Sin(z) k = Cos(z) y = Concat<axis = -1>(s, k)", "its angles are no column times a row"),
        (
            "c = Unsqueeze(t, one) a = Mul(c, z) s = Sin(a) k = Cos(a) y = Concat<axis = -1>(s, k)",
            "its angles are no column times a row",
        ),
        (f"{ANGLES} y = Concat<axis = -1>(k, s)", "sine and cosine are not joined"),
    ],
)
def test_timestep_embedding_says_why_not(body, reason):
    assert refusals(time_model(body), timestep_embedding.fuse) == [reason]


# --- constants --------------------------------------------------------------------------------------------------------


def test_what_no_input_reaches_is_computed():
    graph = model(
        """g (float[b, 3] x) => (float[b, 3] y) <float[3] p = {1.0, 2.0, 3.0}>
        { s = Sin(p) q = Add(s, p) y = Mul(x, q) }"""
    )
    steps = fused(graph, constants.fuse, fires=2, x=normal(2, 3))
    assert [step.op_type for step in steps] == ["Mul"]


def test_weights_outside_the_graph_are_neither_read_nor_folded(tmp_path):
    graph = model("g (float[b, 3] x) => (float[b, 2] y) { t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) }")
    weight = ir.ExternalTensor(
        "missing.bin", 0, 24, ir.DataType.FLOAT, shape=ir.Shape([2, 3]), name="w", base_dir=tmp_path
    )
    value = next(step for step in graph.graph if step.op_type == "Transpose").inputs[0]
    value.const_value = weight
    graph.graph.register_initializer(value)
    assert constants.fuse(graph).fired == 0
    assert value.const_value is weight
    assert [step.op_type for step in graph.graph] == ["Transpose", "MatMul"]
