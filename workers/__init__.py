"""Everything that runs rollouts: the main module of the run process, scheduling policies, the simulator and workers.

``runtime`` is the main module of every run process: it assembles jobs and runs the user's generator. ``scheduling``
holds the policies, which use no clock and do no I/O, so the same code runs in real and in virtual time.
``simulator`` runs the same job over modelled engines. ``members`` is one worker of a worker group, ``backends`` is
where workers run, ``groups`` is the object that has their methods, and ``rollouts`` runs rollouts on workers.
"""

from forebay.core.lazy_names import require_extra

require_extra("server", "cloudpickle")
