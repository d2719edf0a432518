"""Schedules, layouts and traces of other tools, in and out. No torch here.

Torch's CSV files and Megatron's settings become schedules and back; traces of real runs become
measured timelines.
"""
