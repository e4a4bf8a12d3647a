import threading

TASK_TYPE = "idle"


def run_rollout(data):
    threading.Event().wait()
