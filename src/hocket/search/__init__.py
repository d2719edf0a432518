"""Orders found by search: problems, list scheduling, annealing, bounds and the exact solver."""
