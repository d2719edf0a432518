"""torch.distributed.pipelining: its CSV, its lowering, its runtime."""
