"""Runs schedules on real PyTorch modules; the only part of hocket that imports torch."""

from hocket.runtime.pipeline import Pipeline

__all__ = ["Pipeline"]
