"""A run from its start to its end.

A start comes in as a payload. ``start_fields`` completes it, and warns of fields that look misspelt. ``start_checks``
reads it and looks at generator, input file and engines, ``worker_checks`` at the workers that it asks for.
``resumed_run`` says whether it continues a run that is there, by its list and by what the input file holds, or makes a
new one; ``service`` does so, with ``folders`` making the start's own copy of the generator's code and the hooks out
of that copy. Then the reply goes out, and ``launches`` does the rest in the background: a slow generator's verdict, the
process, the rest of the input.

``supervisor`` keeps one ``process`` for each run: it restarts one that crashed, after a pause that doubles, and has
the engines drop the calls of one that is gone. ``records`` gives it what each process is started with
(where runs of the same input are recorded, too), and writes down what becomes of processes and runs;
from there the buffer, the gateway and the readers know that a run has ended.
``gateway_registration`` gives the gateway the keys of a run, and takes them back when it is over.
``folders`` also removes the copies of code that no run needs any more.
``steps`` is what a run's process follows while it works: the trainer's step, closed groups, standstills.

A run that replays another one has no process: ``replay_sources`` finds what is meant, ``replay_starts`` compares it
with what is asked for, and ``replays`` writes it into the run. Where rollouts are missing, or judged again, it has one,
for which ``recorded_groups`` looks up what there is.

Whatever touches a file that a start names does so in a thread of ``input_files``: a dead mount holds up no other run.

Two orders matter everywhere: the code before the hooks before the process, so that an edited file changes no run
half-way; and aborts before a new process, whose request ids begin like those of the old one.
"""
