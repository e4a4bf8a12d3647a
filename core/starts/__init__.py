"""What a run is started with.

``run_start`` is its payload and its lists of ids, stored apart from what changes with each report; ``input_file`` opens
the files that a payload names, in the server and in run processes alike; and ``payload_text`` finds texts that
nothing takes.
"""
