"""The interactive page: its document, its data and the local server behind it."""
