"""The server's part of its runs' traces, and their upkeep.

Input: group and batch changes come from ``buffer/change_records``. ``read_records`` combines all polls of one wait into
a read. ``runs/records`` reports the life of run processes. ``run_traces`` has the recorder of each run, and the trace
settings for other processes. ``shared_engines`` records which runs use the same engines. Single samples are not
recorded, and the event loop never writes to disk.

Upkeep: in a thread, ``trace_upkeep`` regularly trims the files of each run to their budget, closes those of ended runs,
and adds up for ``/metrics`` what the processes of runs have written.
"""
