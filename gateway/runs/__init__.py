"""What the gateway knows of runs: their keys, rollouts and sessions."""
