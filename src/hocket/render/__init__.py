"""Timelines for people: the terminal grid, SVG, plain tables.

Each module imports timeline and what is below it; none imports torch or draws with a library.
"""
