"""Kernels: functions over tensors that know nothing of engines."""
