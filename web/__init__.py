"""What every HTTP face shares: request bodies with their limits, replies, request models, serving an app on a port."""
