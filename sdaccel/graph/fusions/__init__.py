"""Fusions: one a file. Each is a function ``fuse(model) -> Outcome`` that rewrites the graph in place.

For the target "cuda" they leave nodes of the domain ``sdaccel``, version 1. Every node has an ONNX function as its
body, so that ONNX Runtime runs the same graph. Images are [B, C, H, W], tokens [B, S, C]; layout in memory is the
backend's. Weights are the file's own, by name, never transposed or folded.

An input in brackets may be left out (an empty name; trailing ones are cut off). Attributes are always present.
A node has the name of its weight's layer. Its ``overload`` names its form: the optional inputs that are present, in the
order below, then the activation, joined by "+": "bias+residual", "silu", "".

    GroupNorm(x, scale [C], bias [C], [x2], [add]) → y
        num_groups, epsilon, activation: none | silu.
        y = activation(GroupNormalization(concat(x, x2, channels) + add[:, :, None, None])).
        C counts both inputs and a group may straddle them. add is [B, C]. x2 and add never come together.
    LayerNorm(x, scale [C], bias [C], [residual]) → y, [sum]
        epsilon. Over the last axis of sum = x + residual. The second output exists only in the form "residual".
    Conv(x, weight [O, I, h, w], [bias], [residual], [x2]) → y
        strides [2], pads [4] (top, left, bottom, right), activation: none | silu. Group and dilation are 1.
        y = activation(conv(concat(x, x2, channels)) + bias + residual). x2 only where the kernel is 1×1.
    UpsampleConv(x, weight [O, I, 3, 3], [bias], [like]) → y
        A 3×3 convolution, stride 1, padding 1, of x enlarged by its nearest pixel: to twice its height and width, or to
        those of like (whose values are not read). Source row = floor(row · rows in / rows out), which is row // 2
        where rows out is 2n or 2n - 1; the exporter's sizes always are, but the plan is to check.
    Linear(x [..., K], weight [N, K], [bias], [residual]) → y
        activation: none | silu | gelu | quick_gelu | geglu.
        y = activation(x · weightᵀ + bias + residual): the activation comes last. gelu is exact (erf); quick_gelu is
        v · sigmoid(1.702 v); geglu halves the width, first half · gelu(second half), and has no residual.
        x is [B, S, K] or [B, K]; residual has the shape of x · weightᵀ.
    MultiLinear(x [..., K], n × weight [Nᵢ, K], [n × bias]) → n outputs [..., Nᵢ]
        All linears without residual and activation that read x. Forms "n" and "n+bias": n is in the overload.
    ToTokens(x [B, C, H, W]) → [B, H·W, C]
    ToImage(x [B, H·W, C], like [B, any, H, W]) → [B, C, H, W]
        Views where images lie channels last. Only the size of like is read; a value that is needed later anyway.
    TimestepEmbedding(timestep [B], frequencies [1, D / 2] float32) → [B, D]
        flip_sin_to_cos: 0 | 1. In float32: angles = timestep · frequencies; [sin, cos], flipped [cos, sin].
        Form "flip" or "".

Attention is the standard operator on [B, S, H·D] with q_num_heads, kv_num_heads, is_causal and scale (attention.py).
What else stays standard: Add of optional inputs (ControlNet residuals, the Linear of timestep_cond); in text encoders
the embeddings and the choice of the pooled token.
"""
