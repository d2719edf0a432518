"""What went wrong in a run: why its steps are slow (`slow`), and why it hangs (`hang`)."""
