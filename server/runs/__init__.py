"""A run from its start to its end.

A start arrives as a payload. ``start_fields`` completes it, and warns of fields that look misspelt. ``start_checks``
parses it and checks generator, input file and engines; ``worker_checks`` checks the workers, ``array_checks``
the arrays per token that engines are asked for. ``resumed_run`` decides,
by the list of finished ids and the content of the input file, whether the start continues an existing run. ``service``
creates or resumes the run. ``folders`` copies the generator's code for this start, and makes the hooks from that copy.
After the reply, ``launches`` continues in the background: a slow generator's verdict, the process, the rest of the
input.

``supervisor`` keeps one ``process`` per run: it restarts a crashed process after a pause that doubles, and has the
engines drop the calls of a dead one. ``records`` provides what each process is started with (including where runs of
the same input are recorded), and stores the outcome of processes and runs. Through it, the buffer, the gateway and the
readers learn that a run has ended. ``gateway_registration`` registers a run's keys with the gateway, and revokes them
when the run is over. ``folders`` also removes copies of code that no run needs any more. ``steps`` is what a run's
process follows while it works: the trainer's step, closed groups, pauses.

A run that replays another one has no process: ``replay_sources`` finds the recording, ``replay_starts`` compares it
with the start, and ``replays`` writes it into the run. If rollouts are missing or judged again, the run has a process,
for which ``recorded_groups`` looks up the recorded ones.

``evaluations`` starts an evaluation of a run's weights as a run of its own, ends it when they are replaced, and stores
its result; ``evaluation_statistics`` computes the numbers.

All access to a file that a start names runs in a thread of ``input_files``, so that a dead mount blocks no other run.

Two orders matter everywhere. Code comes before hooks and hooks before the process, so that an edited file does not
change a run half-way. Aborts come before a new process, because its request ids begin like those of the old one.
"""
