"""Kernels in Triton; importing them needs `triton`, running them a GPU or the interpreter."""
