"""Fusion: definitions of tensors, which of them are materialised, and the kernels that compute them."""
