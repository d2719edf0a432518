"""Runs the cells of examples/tour.ipynb; as a script, it writes their outputs into the file.

`python tests/examples/notebook.py` with src on PYTHONPATH, after a cell or hocket has changed.
"""

import ast
import contextlib
import io
import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def read():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def with_outputs(notebook):
    """The notebook with the outputs of its code cells, run in order in one namespace."""
    names, count, cells = {"__name__": "__main__"}, 0, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = _run("".join(cell["source"]), names, count)
            cell = cell | {"execution_count": count, "outputs": outputs}
        cells.append(cell)
    return notebook | {"cells": cells}


def _run(source, names, count):
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_svg_"):
            data["image/svg+xml"] = value._repr_svg_().splitlines(keepends=True)
        outputs.append({"data": data, "execution_count": count, "metadata": {},
                        "output_type": "execute_result"})  # fmt: skip
    return outputs


if __name__ == "__main__":
    text = json.dumps(with_outputs(read()), indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")
