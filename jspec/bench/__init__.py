"""Measuring: loads, the client that sends them, figures, and `jspec bench`."""
