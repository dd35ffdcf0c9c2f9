"""Mutations of pure modules by the operators of Cosmic Ray: of comparisons, arithmetic, numbers,
conditions and loops."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from tests.mutants.tree import Function, Tree

GENERAL = "general"
_OPERATORS = (
    "core/AddNot",
    "core/NumberReplacer",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceTrueWithFalse",
    "core/ZeroIterationForLoop",
    "core/ReplaceBinaryOperator_Add_Sub",
    "core/ReplaceBinaryOperator_Sub_Add",
    "core/ReplaceBinaryOperator_Mul_Add",
    "core/ReplaceBinaryOperator_FloorDiv_Mul",
    "core/ReplaceBinaryOperator_Mod_FloorDiv",
    "core/ReplaceComparisonOperator_Eq_NotEq",
    "core/ReplaceComparisonOperator_NotEq_Eq",
    "core/ReplaceComparisonOperator_Lt_LtE",
    "core/ReplaceComparisonOperator_LtE_Lt",
    "core/ReplaceComparisonOperator_Gt_GtE",
    "core/ReplaceComparisonOperator_GtE_Gt",
    "core/ReplaceComparisonOperator_Is_IsNot",
    "core/ReplaceComparisonOperator_IsNot_Is",
)


@dataclass(frozen=True)
class GeneralMutation:
    """A mutation by an operator of Cosmic Ray."""

    name: str
    """OPERATOR:OCCURRENCE in the module."""
    function: str
    statement: ast.stmt
    line: int
    before: str
    """The line."""


def general_mutations(
    source: str, functions: Iterable[tuple[Function, str]]
) -> Iterator[GeneralMutation]:
    """Yield the mutations in the bodies of `functions` of a module. Without Cosmic Ray there are
    none."""
    if not is_installed():
        return
    from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]

    places = [_Places(function, name) for function, name in functions]
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    for operator_name in _OPERATORS:
        operator = get_operator(operator_name)()
        found = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(found):
            for place in places:
                statement = place.statement_at(start)
                if statement is not None:
                    line = lines[start[0] - 1].strip()
                    name = f"{operator_name}:{occurrence}"
                    yield GeneralMutation(name, place.name, statement, start[0], line)


def generally_mutated(source: str, name: str) -> str:
    """Return the source of a module with one mutation."""
    from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]

    operator_name, _, occurrence = name.partition(":")
    code = mutate_code(source, get_operator(operator_name)(), int(occurrence))
    assert code is not None
    return code


@cache
def is_installed() -> bool:
    """Whether Cosmic Ray is installed."""
    try:
        import cosmic_ray.mutating  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


class _Places:
    """The statements of a function, and what is excluded from mutations."""

    def __init__(self, function: Function, name: str) -> None:
        tree = Tree(function)
        self.name = name
        self._function = function
        self._excluded = tree.excluded
        self._statements = [node for node in tree.nodes(ast.stmt) if isinstance(node, ast.stmt)]

    def statement_at(self, position: tuple[int, int]) -> ast.stmt | None:
        """Return the innermost statement at a line and column; None if nothing is mutated there."""
        if not _holds(self._function, position):
            return None
        if any(_holds(node, position) for node in self._excluded):
            return None
        around = [statement for statement in self._statements if _holds(statement, position)]
        return max(
            around, key=lambda statement: (statement.lineno, statement.col_offset), default=None
        )


def _holds(node: ast.AST, position: tuple[int, int]) -> bool:
    first = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
    last = (getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0))
    return first <= position < last
