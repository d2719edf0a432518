"""Traces that other tools wrote, read back as timelines."""
