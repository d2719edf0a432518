"""Passes from schedule to schedule. Each returns a new value and leaves its input alone."""

from hocket.lower.backward import merge_backward
from hocket.lower.communication import insert_communication, strip_communication
from hocket.lower.offloading import offload
from hocket.lower.recomputation import recompute

__all__ = ["insert_communication", "merge_backward", "offload", "recompute", "strip_communication"]
