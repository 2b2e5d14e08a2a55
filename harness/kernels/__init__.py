"""Triton kernels on the shared state model."""
