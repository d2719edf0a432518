"""Faults of hocket that are known and not mended: what the drawn inputs leave out for them.

Each has a strict xfail test in test_known.py; when that passes, delete it there and its line here.
"""

OPEN = {
    "messages within a rank",
    "transfers in a slot of messages",
    "slots of messages on streams",
    "rendezvous on streams",
}
