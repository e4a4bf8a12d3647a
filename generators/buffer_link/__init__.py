"""The way from a run process to its buffer, Forebay's own or slime's."""
