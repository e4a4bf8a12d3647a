"""Backends run the workers of a group: in this process, in other processes of this machine, or on a Ray cluster.

``abc`` is the interface of a backend, and ``by_name`` finds one. ``inline`` runs workers in this process.
``processes`` starts processes, whose main module is ``child``, and talks to them over a ``channel``; ``endings``
describes how a process ended. ``ray`` starts actors: ``ray_cluster`` joins a cluster and owns the placement groups,
``ray_member`` runs on the node. These two backends share three modules. ``remote_worker`` is the controller's handle
of a worker, with its unanswered calls. ``wire`` converts calls and their outcomes to bytes and back. ``watch`` is the
thread that checks deadlines and silent workers.
"""
