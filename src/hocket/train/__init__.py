"""The training application behind `hocket run` and `hocket profile`."""
