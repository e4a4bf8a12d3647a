"""Logs (``log``) and metrics in the form of Prometheus (``metrics``)."""
