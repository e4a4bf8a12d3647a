"""The words that every part of Forebay shares. Imports nothing of ours."""
