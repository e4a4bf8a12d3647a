"""What starts a run's rollouts: the main of the run process, and the policies that choose what comes next, and where.

``runtime`` is the main of every run process: it puts jobs together, and runs the user's generator. ``scheduling`` has
the policies. They know no clock and do no I/O, so that the same code runs in real time and in virtual time.
``simulator`` is that: the same job over engines that are models. ``members`` is what one worker of a worker group is,
``backends`` where such workers run, ``groups`` the object that has their methods; ``rollouts`` is runs over workers.
"""
