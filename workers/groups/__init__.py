"""Worker groups: the controller reads like a single-process script, while its methods run on many workers.

``group`` starts the workers of a pool (``resource_pool``) and has their registered methods (``register``,
``bound_method``). A call goes through ``method_caller``. ``dispatch`` lays its arguments out over the workers, and
splits them (``splitting``) in some modes. ``group_workers`` tracks idle, busy and lost workers, sends each rank its
call, retries it and applies its deadline. The caller gets a ``call``, or for ``MAP`` the results of ``mapping``,
which sends items to idle workers.
"""

from forebay.workers.groups.bound_method import ColocatedClasses, create_colocated_worker_cls
from forebay.workers.groups.call import GroupCall as Call
from forebay.workers.groups.dispatch import (
    NOT_CALLED,
    Dispatch,
    collect_all_to_all,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from forebay.workers.groups.group import WorkerGroup
from forebay.workers.groups.mapping import MapCall
from forebay.workers.groups.register import Execute, register, registration_of
from forebay.workers.groups.resource_pool import ResourcePool, ResourcePoolManager
from forebay.workers.groups.splitting import register_split
from forebay.workers.members.worker import ClassWithInitArgs, Worker
from forebay.workers.members.worker_errors import PlacementFailed, WorkerError, WorkerFailed, WorkerLost

__all__ = [
    "NOT_CALLED",
    "Call",
    "ClassWithInitArgs",
    "ColocatedClasses",
    "Dispatch",
    "Execute",
    "MapCall",
    "PlacementFailed",
    "ResourcePool",
    "ResourcePoolManager",
    "Worker",
    "WorkerError",
    "WorkerFailed",
    "WorkerGroup",
    "WorkerLost",
    "collect_all_to_all",
    "create_colocated_worker_cls",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "register_split",
    "registration_of",
    "update_dispatch_mode",
]
