"""The published layout of logs, line by line.

``published_lines.py`` reads a line in any spelling, ``published_events.py`` knows what each event is, and
``published_requests.py`` makes a request of its lines, with ``deepest_time.py``: whose time each moment was.
"""
