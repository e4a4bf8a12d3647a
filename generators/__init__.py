"""Generators: how they are found, inspected and run, and the base to write them with."""
