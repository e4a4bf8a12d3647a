"""The docstrings of fields, for the generated pages."""

import ast
import inspect
import textwrap


def field_texts(model: type) -> dict[str, str]:
    """The docstring below each field in the source of ``model``, on one line, with single backticks."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    assert isinstance(tree.body[0], ast.ClassDef)
    texts, name = {}, ""
    for node in tree.body[0].body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                texts[name] = " ".join(text.split()).replace("``", "`")
    return texts
