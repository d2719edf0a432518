"""Changes to files that keep most of their grammar: of words, of JSON, of protobuf, of gzip."""

import copy
import gzip
import json
import re

NUMBERS = [
    "0", "1", "2", "3", "-1", "7", "0.5", "1.5", "255", "65536", "4294967296", "16777215",
    "99999999999", "9223372036854775807", "9223372036854775808", "1e308", "1e-320", "-0.0",
    "1" * 5000, "nan", "inf", "٣", "0x10", "1_0",
]  # fmt: skip
ODD = ["", " ", "\n", "\0", "\ufeff", "\r\n", "é", "\u2028", "(" * 3000, "[" * 3000, "x" * 5000]
TOKEN = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?|[A-Za-z_]+|\s+|.", re.S)


def words(rng, data, dictionary):
    """Text with tokens changed, taken away, repeated, swapped or put in; or lines, or bytes."""
    text = data.decode("utf-8", "surrogateescape")
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        text = rng.choice((_token, _token, _token, _line, _cut))(rng, text, dictionary)
    raw = text.encode("utf-8", "surrogateescape")
    return octets(rng, raw) if rng.random() < 0.1 else raw


def _token(rng, text, dictionary):
    tokens = TOKEN.findall(text) or [""]
    i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    numbers = [k for k, token in enumerate(tokens) if token[:1].isdigit()]
    change = rng.randrange(8)
    if change < 3 and numbers:
        tokens[rng.choice(numbers)] = rng.choice(NUMBERS)
    elif change == 3:
        tokens[i], tokens[j] = tokens[j], tokens[i]
    elif change == 4:
        del tokens[i : i + rng.choice((1, 1, 2, 9))]
    elif change == 5:
        tokens[i:i] = tokens[j : j + rng.choice((1, 2, 9))] * rng.choice((1, 1, 2, 50))
    else:
        tokens.insert(i, rng.choice(dictionary if rng.random() < 0.7 else ODD))
    return "".join(tokens)


def _line(rng, text, dictionary):
    lines = text.split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    if rng.random() < 0.4:
        lines[i], lines[j] = lines[j], lines[i]
    elif rng.random() < 0.5:
        lines.insert(i, lines[j])
    else:
        del lines[i]
    return "\n".join(lines)


def _cut(rng, text, dictionary):
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text


def octets(rng, data):
    """Bytes changed, cut, doubled."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        i = rng.randrange(len(out) + 1)
        change = rng.randrange(4)
        if change == 0:
            out[i : i + 1] = bytes([rng.randrange(256)])
        elif change == 1:
            del out[i : i + rng.choice((1, 4, 100))]
        elif change == 2:
            out[i:i] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4))))
        else:
            out[i:i] = out[i : i + 64]
    return bytes(out)


# --- JSON ----------------------------------------------------------------------------------------

VALUES = [
    None, True, "", "s", "0", "-1", 0, 1, -1, 2, 1.5, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, 2**64,
    10**400, float("nan"), float("inf"), [], {}, [[]], [0], [None], {"stage": 0}, "x" * 300, "\0",
]  # fmt: skip


def tree(rng, data, dictionary):
    """JSON with values, keys and entries changed; sometimes its text too."""
    root = [json.loads(data)]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _branch(rng, root, dictionary)
    text = json.dumps(root[0] if root else None).encode("utf-8", "surrogatepass")
    return words(rng, text, dictionary) if rng.random() < 0.1 else text


def _branch(rng, root, dictionary):
    places = list(_places(root))
    if not places:
        return
    holder, key = rng.choice(places)
    change = rng.randrange(9)
    if change < 3:
        holder[key] = copy.deepcopy(rng.choice(VALUES))  # the next seed needs them unchanged
    elif change == 3:
        holder[key] = rng.choice(dictionary)
    elif change == 4 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * rng.choice((0, -1, 2, 1000)) + rng.choice((0, 1, -7))
    elif change == 5:
        del holder[key]
    elif change == 6:
        other, there = rng.choice(places)
        holder[key] = copy.deepcopy(other[there])
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif isinstance(holder[key], list):
        rng.shuffle(holder[key])


def _places(value):
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


# --- protobuf ------------------------------------------------------------------------------------


def fields(rng, data, dictionary):
    """Protobuf with fields changed, taken away, repeated, and numbers taken from other places."""
    message = _parsed(data)
    if message is None:
        return octets(rng, data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        _field(rng, message)
    out = _written(message)
    return octets(rng, out) if rng.random() < 0.2 else out


def _field(rng, message):
    messages = list(_messages(message))
    holder = rng.choice(messages)
    if not holder:
        return
    i = rng.randrange(len(holder))
    number, wire, value = holder[i]
    numbers = [f[2] for m in messages for f in m if f[1] == 0]
    change = rng.randrange(6)
    if change < 2 and wire == 0 and numbers:
        holder[i] = number, 0, rng.choice((rng.choice(numbers), 0, 1, 2**31, 2**63, 2**64 - 1))
    elif change == 2:
        del holder[i]
    elif change == 3:
        holder.insert(rng.randrange(len(holder) + 1), holder[i])
    elif change == 4:
        holder[i] = rng.randrange(16), wire, value
    else:
        holder[i] = rng.choice(
            ((number, 0, 1), (number, 2, b"\xff\xfe"), (number, 2, b""), (number, 5, b"abcd"))
        )


def _messages(message):
    yield message
    for _, _, value in message:
        if isinstance(value, list):
            yield from _messages(value)


def _parsed(data, depth=0):
    """[(number, wire, value)], values messages where they can be; None where it is no message."""
    out, at = [], 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            wire = key & 7
            if wire == 0:
                value, at = _varint(data, at)
            elif wire == 2:
                length, at = _varint(data, at)
                value, at = bytes(data[at : at + length]), at + length
                inner = _parsed(value, depth + 1) if depth < 6 and value else None
                value = value if inner is None else inner
            elif wire in (1, 5):
                length = 8 if wire == 1 else 4
                value, at = bytes(data[at : at + length]), at + length
            else:
                return None
            out.append((key >> 3, wire, value))
    except IndexError:
        return None
    return out if at == len(data) else None


def _written(message):
    out = bytearray()
    for number, wire, value in message:
        out += _as_varint(number << 3 | wire)
        if wire == 0:
            out += _as_varint(value if isinstance(value, int) else 1)
        else:
            raw = (
                _written(value)
                if isinstance(value, list)
                else value
                if isinstance(value, bytes)
                else b"1"
            )
            out += _as_varint(len(raw)) + raw if wire == 2 else raw
    return bytes(out)


def _varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _as_varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


# --- gzip ----------------------------------------------------------------------------------------


def packed(rng, data, dictionary):
    """A compressed JSON file: its content changed, or the compressed bytes damaged."""
    content = gzip.decompress(data)
    if rng.random() < 0.5:
        return octets(rng, data)
    return gzip.compress(tree(rng, content, dictionary), compresslevel=1, mtime=0)
