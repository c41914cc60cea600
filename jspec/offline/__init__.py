"""Many requests from a file, without a server."""
