"""The protocols that agents speak, and their translation to chat completions."""
