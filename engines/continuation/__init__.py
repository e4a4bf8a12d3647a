"""Going on with a call after its engine aborted it."""
