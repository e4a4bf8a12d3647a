"""Groups: their members, deadlines, meta info and the alarm."""
