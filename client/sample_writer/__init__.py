"""What a generator elsewhere writes with."""
