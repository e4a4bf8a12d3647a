"""One rollout: its attempts, its client, its recorded calls, its samples."""
