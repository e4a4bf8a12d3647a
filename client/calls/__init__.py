"""The HTTP client of our own server: calls, their repetition, and the connections."""
