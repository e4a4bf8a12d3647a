"""The sentences that stand below fields in the code, for the generated pages."""

import ast
import inspect
import textwrap


def field_texts(model: type) -> dict[str, str]:
    """The string below each field in the source of ``model``, in one line, with single backticks."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    assert isinstance(tree.body[0], ast.ClassDef)
    sentences, name = {}, ""
    for node in tree.body[0].body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                sentences[name] = " ".join(text.split()).replace("``", "`")
    return sentences
