"""Batches that were handed out, and the checkpoints that hold them."""
