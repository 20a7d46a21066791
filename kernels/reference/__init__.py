"""Reference kernels in torch, exact in float64."""
