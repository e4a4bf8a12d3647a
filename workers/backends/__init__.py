"""Where the workers of a group run: in this process, in others on this machine, or on a Ray cluster.

``abc`` is what a group asks of each of them, ``by_name`` finds one. ``inline`` runs workers in this process.
``processes`` starts others, whose main is ``child``, and speaks with them over a ``channel``; ``endings`` says how one
of them ended. ``ray`` starts actors: ``ray_cluster`` joins a cluster, ``ray_places`` has placement groups on it,
``ray_member`` is what runs there, ``ray_worker`` the end that we hold of it, and ``hand_over`` the thread for what Ray
tells us. What these two backends have in common: ``remote_worker`` is that end, as far as it is the same, ``wire``
makes bytes of calls and of what comes of them, ``pending`` has the calls that are not answered yet, and ``watch`` is
the thread that sees to their deadlines, and to workers that say nothing.
"""
