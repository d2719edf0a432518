"""The demo: a small model, its data, and stages that only sleep. Imported by name, when run."""
