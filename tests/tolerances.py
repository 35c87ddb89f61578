"""Every numeric limit that a test holds us to, with its reason."""

import torch

# An exported graph run by ONNX Runtime against the torch module it came from, both float32, outputs of order 1:
# summation order alone differs; measured 5e-6 on tiny and small models.
EXPORT_MAX_ABS = 1e-4

# A whole pipeline through engines against the same pipeline in eager torch, float32, per pixel in 0..1:
# a component's 5e-6 grows over the steps but stays well under one grey level (4e-3).
PIPELINE_MAX_ABS = 1e-4

# The same for an image of a million pixels, where the largest of 3 million values counts: 1.03e-4 at 1000x1000 on an
# AMD EPYC, below 1e-4 on an Intel Xeon.
LARGE_IMAGE_MAX_ABS = 2e-4

# A pipeline in torch against itself with the same weights mapped from a file: they lie elsewhere in their cache lines,
# and some kernels add up in another order then. Measured 4.8e-7.
SAME_NETWORK_MAX_ABS = 1e-5

# GroupNormalization over a million pixels in float32 against float64, outputs of order 5: rounding of single values
# (2e-7 each) is what may remain; one long float32 sum would be off by 1e-4 and more.
GROUP_NORM_MAX_ABS = 1e-5

# Attention in 16 bits against float64, relative to the result's norm: the softmax's weights are rounded, the result is
# rounded, and tactics that keep scores in 16 bits round those too. Half a unit in the last place is 5e-4 and 4e-3.
ATTENTION_REL = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

# Norm of the error of a linear layer or convolution against float64, relative to the result: products are exact, sums
# are float32, so the result's rounding is left (2e-4, 1.7e-3), twice where a library rounds before it adds a residual,
# and what its reduced-precision reductions lose.
GEMM_REL = {torch.float16: 1e-3, torch.bfloat16: 8e-3}

# A norm, activation or softmax in 16 bits against float64, relative to the result's norm: ours rounds the result once
# (2.1e-4 and 1.7e-3 on average), plain torch up to three values on the way to it.
ROUNDING_REL = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}

# A VAE in float16 against itself in float32, relative to the result's norm: one rounding (5e-4 at most) a layer, some
# 30 layers. Measured on the tiny ones: 1e-3.
VAE_FP16_REL = 4e-3

# A pipeline in float16 through engines against the same pipeline in torch's float16, in dB over the image's range: both
# round at every layer, in different places. Below 35 dB the difference begins to show.
FP16_IMAGE_PSNR = 35.0

# The same in bfloat16, with three bits less: 18 dB.
BF16_IMAGE_PSNR = 17.0

# Seconds of a thread for reading a damaged file: work as large as a number in it says would take minutes; it takes
# milliseconds, or a second where Python collects the garbage of all tests before.
ENDLESS = 10.0

# A layer's ΔW (of order 1) in float32 against the weights that PEFT or LyCORIS merge less those before: the two
# subtract values of order 1, and rotations are solved by other routines. Measured 5e-7.
ADAPTER_MAX_ABS = 1e-5
