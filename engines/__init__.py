"""Clients for inference servers (OpenAI-compatible, SGLang), pools of them, and an engine with scripted answers."""
