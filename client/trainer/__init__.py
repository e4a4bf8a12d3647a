"""What a trainer reads with: batches, leases, checkpoints, weight versions."""
