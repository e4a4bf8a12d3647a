"""Groups, deadlines, delivery and the read pipeline, over a durable store."""
