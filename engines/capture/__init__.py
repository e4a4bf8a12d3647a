"""Token-exact capture: what an engine was asked and what it sampled, turn by turn, and the samples made of it."""
