"""Where samples and state live: one interface, a memory store, and the journal."""
