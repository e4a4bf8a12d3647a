"""The server's part of the traces of its runs, and what is done for all of them.

In: changes of groups and batches, by ``buffer/change_records``; reads, by ``read_records``, which makes one of all the
polls of a wait; what becomes of a run's process, by ``runs/records``. ``run_traces`` has the recorder of each run, and
what other processes are told that record. Nothing is recorded for a sample, and nothing is written in the loop.

Out: ``trace_upkeep`` keeps the files of each run to their budget and closes those of runs that are over, from time to
time and in a thread, and adds up for ``/metrics`` what the processes of runs have written.
"""
