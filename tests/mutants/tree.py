"""The syntax tree of a function, with links to parents, and edits of it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
_MESSAGES = re.compile(r"(logger|warnings)\.|warn_on_rank_0|print$|log_error_on_rank_0")


@dataclass(frozen=True)
class Edit:
    """A possible mutation of a function."""

    statement: ast.stmt
    """The statement whose execution reaches the mutation."""
    replacements: tuple[tuple[ast.AST, ast.AST], ...]
    """Nodes, and what replaces them."""

    @property
    def before(self) -> str:
        return "; ".join(ast.unparse(node) for node, _ in self.replacements)

    @property
    def after(self) -> str:
        return "; ".join(ast.unparse(replacement) for _, replacement in self.replacements)


class Tree:
    """The syntax tree of a function."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._parents: dict[ast.AST, tuple[ast.AST, str, int | None]] = {}
        self._link(function)
        self.excluded: list[ast.AST] = []
        """Docstrings, annotations, and messages of errors and logs."""
        self._nodes = [
            node for statement in function.body for node in _nodes(statement, self.excluded)
        ]

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """Return the nodes of `kinds` in the function and in functions inside of it, without those
        that are `excluded`."""
        return (node for node in self._nodes if isinstance(node, kinds))

    def calls(self) -> Iterator[ast.Call]:
        for node in self.nodes(ast.Call):
            assert isinstance(node, ast.Call)
            yield node

    def call_statements(self) -> Iterator[tuple[ast.Expr, ast.Call]]:
        """Yield the calls whose result is not used, with their statements."""
        for call in self.calls():
            parent = self.parent_of(call)
            if isinstance(parent, ast.Expr):
                yield parent, call

    def parent_of(self, node: ast.AST) -> ast.AST:
        return self._parents[node][0]

    def statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parent_of(node)
        return node

    def function_of(self, node: ast.AST) -> str:
        """Return the name of the innermost function around `node`."""
        while not isinstance(node, Function):
            node = self.parent_of(node)
        return node.name

    def next_to(self, statement: ast.stmt) -> ast.stmt | None:
        """Return the next statement of the same block."""
        parent, name, index = self._parents[statement]
        assert index is not None
        block = getattr(parent, name)
        return block[index + 1] if index + 1 < len(block) else None

    def edit(self, *replacements: tuple[ast.AST, ast.AST]) -> Edit:
        return Edit(self.statement_of(replacements[0][0]), replacements)

    def apply(self, edit: Edit) -> None:
        """Edit the tree in place."""
        for node, replacement in edit.replacements:
            parent, name, index = self._parents[node]
            ast.copy_location(replacement, node)
            if index is None:
                setattr(parent, name, replacement)
            else:
                getattr(parent, name)[index] = replacement

    def _link(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                # Contexts (`ast.Load`) and operators are shared by all nodes.
                if isinstance(child, ast.AST):
                    self._parents[child] = (node, name, index if isinstance(value, list) else None)
                    self._link(child)


def _nodes(node: ast.AST, excluded: list[ast.AST]) -> Iterator[ast.AST]:
    is_message = isinstance(node, ast.Call) and _MESSAGES.match(called(node))
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert) or is_docstring(node) or is_message:
        excluded.append(node)
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if name in ("annotation", "returns", "decorator_list"):
                excluded.append(child)
            else:
                yield from _nodes(child, excluded)


def is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def called(call: ast.Call) -> str:
    """Return the source of the called function."""
    return ast.unparse(call.func)


def called_name(call: ast.Call) -> str:
    """Return the last part of the name of the called function."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def names(node: ast.AST) -> Iterator[str]:
    """Yield the names, attributes and keywords in `node`."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr
        elif isinstance(child, ast.keyword) and child.arg:
            yield child.arg


def assigned_names(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def mentions(node: ast.AST, *patterns: re.Pattern[str]) -> bool:
    return any(pattern.search(name) for name in names(node) for pattern in patterns)


def expression(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body
