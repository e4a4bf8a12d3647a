"""Agents as generators: their tasks, limits, records and verifiers."""
