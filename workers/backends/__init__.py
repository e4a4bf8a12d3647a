"""Where the workers of a group run: in this process, in others on this machine, or on a Ray cluster.

``abc`` is what a group asks of each of them, ``by_name`` finds one. ``inline`` runs workers in this process.
``processes`` starts others, whose main is ``child``, and speaks with them over a ``channel``; ``endings`` says how one
of them ended. ``ray`` starts actors: ``ray_cluster`` joins a cluster and has the placement groups on it,
``ray_member`` is what runs there. What these two backends have in common: ``remote_worker`` is the end that we hold of
a worker, with the calls that are not answered yet, ``wire`` makes bytes of calls and of what comes of them, and
``watch`` is the thread that sees to their deadlines, and to workers that say nothing.
"""
