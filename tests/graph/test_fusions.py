"""Each fusion against the graph it came from, run by ONNX Runtime, and the reasons for which it does not fire."""

import numpy as np
import onnx_ir as ir
import pytest

from sdaccel.graph import for_onnxruntime
from sdaccel.graph.fusions import attention, noops
from tests.graph.small import model, normal, ops, run
from tests.tolerances import EXPORT_MAX_ABS, GROUP_NORM_MAX_ABS


def attention_model(perm: str = "[0, 2, 1, 3]", causal: int = 0) -> ir.Model:
    split = "".join(
        f"{name}4 = Reshape({name}, heads) {name}h = Transpose<perm={perm}>({name}4)" for name in ("q", "k", "v")
    )
    return model(
        f"""g (float[b, s, 24] q, float[b, t, 24] k, float[b, t, 24] v) => (float[b, s, 24] y)
        <int64[4] heads = {{0, -1, 3, 8}}, int64[3] flat = {{0, -1, 24}}>
        {{ {split}
           a = Attention<is_causal={causal}>(qh, kh, vh)
           at = Transpose<perm=[0, 2, 1, 3]>(a)
           y = Reshape(at, flat) }}"""
    )


@pytest.mark.parametrize("tokens", [1, 77, 231])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("batch", [1, 3])
def test_attention_without_head_transposes(tokens, causal, batch):
    graph = attention_model(causal=causal)
    length = tokens if causal else 35
    inputs = {"q": normal(batch, length, 24), "k": normal(batch, tokens, 24), "v": normal(batch, tokens, 24)}
    expected = run(graph, **inputs)
    assert attention.fuse(graph).fired == 1
    assert ops(graph) == ["Attention"]
    assert np.abs(run(graph, **inputs) - expected).max() <= EXPORT_MAX_ABS
    assert for_onnxruntime.attention(graph).fired == 1
    assert ops(graph) == ["MultiHeadAttention"]
    assert np.abs(run(graph, **inputs) - expected).max() <= EXPORT_MAX_ABS


def test_attention_says_why_it_does_not_fuse():
    outcome = attention.fuse(attention_model(perm="[0, 2, 3, 1]"))
    assert outcome.fired == 0
    assert list(outcome.refused) == ["an input is not split into heads by Reshape and Transpose"]


def test_attention_that_caps_its_scores_is_left_alone():
    graph = model(
        """g (float[b, 3, s, 8] q, float[b, 3, t, 8] k, float[b, 3, t, 8] v) => (float[b, 3, s, 8] y)
        { y = Attention<softcap=5.0>(q, k, v) }"""
    )
    assert list(attention.fuse(graph).refused) == ["it caps its scores"]


def test_attention_with_a_mask_is_left_alone():
    graph = model(
        """g (float[b, 3, s, 8] q, float[b, 3, t, 8] k, float[b, 3, t, 8] v, bool[s, t] m) => (float[b, 3, s, 8] y)
        { y = Attention(q, k, v, m) }"""
    )
    outcome = attention.fuse(graph)
    assert (outcome.fired, outcome.refused.total()) == (0, 1)
    assert ops(graph) == ["Attention"]


def test_linear_reads_its_weight_as_it_lies_in_the_file():
    weight = normal(5, 24)
    graph = model(
        """g (float[b, s, 24] x) => (float[b, s, 5] y)
        { t = Transpose<perm=[1, 0]>(w) y = MatMul(x, t) }""",
        w=weight,
    )
    x = normal(2, 7, 24)
    assert for_onnxruntime.linear(graph).fired == 1
    assert ops(graph) == ["FusedMatMul"]
    assert np.abs(run(graph, x=x) - x @ weight.T).max() <= EXPORT_MAX_ABS


def test_linear_leaves_a_product_of_two_inputs_alone():
    graph = model(
        """g (float[3, 4] x, float[5, 4] z) => (float[3, 5] y)
        { t = Transpose<perm=[1, 0]>(z) y = MatMul(x, t) }"""
    )
    outcome = for_onnxruntime.linear(graph)
    assert (outcome.fired, list(outcome.refused)) == (0, ["the second factor is not a transposed weight"])


def group_norm_model() -> ir.Model:
    return model(
        """g (float[b, 8, h, w] x) => (float[b, 8, h, w] y)
        { y = GroupNormalization<num_groups=2, epsilon=0.00001>(x, scale, bias) }""",
        scale=normal(8),
        bias=normal(8) + 1,
    )


FUSE = [for_onnxruntime.group_norm, for_onnxruntime.group_norm_of_images]


@pytest.mark.parametrize("fuse", FUSE)
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (13, 9)])
@pytest.mark.parametrize("batch", [1, 4])
def test_group_norm(fuse, size, batch):
    graph = group_norm_model()
    x = 3 * normal(batch, 8, *size) + 2
    expected = run(graph, x=x)
    assert fuse(graph).fired == 1
    assert "GroupNormalization" not in ops(graph)
    assert np.abs(run(graph, x=x) - expected).max() <= EXPORT_MAX_ABS


def test_a_division_by_one_goes_and_another_stays():
    graph = model(
        """g (float[4] x) => (float[4] y) <float one = {1.0}, float two = {2.0}>
        { a = Div(x, one) b = Div(a, two) y = Add(b, b) }"""
    )
    assert noops.fuse(graph).fired == 1
    assert ops(graph) == ["Div", "Add"]
    np.testing.assert_array_equal(run(graph, x=np.arange(4, dtype=np.float32)), np.arange(4, dtype=np.float32))


def test_group_norm_of_images_is_exact_on_a_megapixel():
    """Against float64: a plain float32 sum over a million pixels would be off by more than the limit."""
    graph = group_norm_model()
    for_onnxruntime.group_norm_of_images(graph)
    x = 3 * normal(1, 8, 1000, 1000) + 2
    weights = {name: value.const_value.numpy() for name, value in graph.graph.initializers.items()}
    groups = x.astype(np.float64).reshape(1, 2, -1)
    exact = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
    exact = exact.reshape(x.shape) * weights["scale"][:, None, None] + weights["bias"][:, None, None]
    assert np.abs(run(graph, x=x) - exact).max() <= GROUP_NORM_MAX_ABS
