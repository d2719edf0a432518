"""Measured costs of published systems, as files that `--costs NAME` finds."""
