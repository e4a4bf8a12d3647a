"""A read: which groups it gets, how they are judged, and their rows."""
