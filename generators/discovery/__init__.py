"""Finding generator files, and looking into them in a process of their own."""
