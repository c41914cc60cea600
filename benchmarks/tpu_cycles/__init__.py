"""Estimates of TPU step and kernel times from what the TPU compiler says; no TPU is needed."""
