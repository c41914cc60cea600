"""Does speculation change nothing, and does it pay? `jspec verify` and `jspec doctor`."""
