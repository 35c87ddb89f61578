"""Every numeric limit that a test holds us to, with its reason."""

# An exported graph run by ONNX Runtime against the torch module it came from, both float32, outputs of order 1:
# summation order alone differs; measured 5e-6 on tiny and small models.
EXPORT_MAX_ABS = 1e-4

# A whole pipeline through engines against the same pipeline in eager torch, float32, per pixel in 0..1:
# a component's 5e-6 grows over the steps but stays well under one grey level (4e-3).
PIPELINE_MAX_ABS = 1e-4

# The same for images of a megapixel: ONNX Runtime's InstanceNormalization adds up a whole group of the VAE's pixels in
# float32, one after the other, so its error grows with the area. Measured 2e-4 at 1000x1000; a grey level is 4e-3.
LARGE_IMAGE_MAX_ABS = 1e-3
