"""What the base generator has to do: rows, open groups, the order of rollouts."""
