"""Mutation operators: the mistakes of parallel training, as edits of a syntax tree.

Each operator finds its sites by the shape of the code and by the names in it, never by paths.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.mutants.tree import (
    Edit,
    Tree,
    assigned_names,
    called,
    called_name,
    expression,
    is_docstring,
    mentions,
    names,
)

_COLLECTIVE = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|all_to_all)\w*$|(broadcast|broadcast_\w+|barrier)$"
)
_SUM = re.compile(r"all_reduce(_|_numbers|_sum)?$")
_SYNCHRONIZATION = re.compile(
    r"_?(sync|synchronize|reduce|align|exchange|redistribute|share|publish|confirm|agree|apply"
    r"|copy_|foreach_copy_|load_state_dict|register_\w*hook|return_gradient)(_\w+)?$"
)
_WAIT = re.compile(
    r"_?(wait|synchronize|wait_stream|wait_event|wait_for_\w+|join|drain|flush|fsync|settle"
    r"|acquire|record_stream)$"
)
_INVALIDATION = re.compile(
    r"_?(clear|cache_clear|reset|invalidate|forget|zero|discard|abandon|drop|evict|detach)(_\w*)?$"
)
_CHANGE = re.compile(
    r"reduce|sum|gather|scatter|broadcast|clip|norm|scale|zero|div|mul|add_$|copy|step|backward"
    r"|commit|save|load|restore|apply|update|wait|begin|end|close|send|write|put"
)
_PARALLEL = re.compile(
    r"rank|world|mesh|axis|axes|group|stage|shard|replica|replicate|degree|microbatch|pipeline|tied"
    r"|step|committed|peer|donor|leader|owner|local|(^|_)(tp|pp|cp|ep|etp)(_|$)"
)
_COUNT = re.compile(
    r"num_|count|size|degree|world|total|norm|scale|steps|targets|tokens|ranks|replicas|length"
)
_INDEX = re.compile(
    r"offset|start|stop|begin|end$|stage|cursor|microbatch|index|position|slot|first|last|chunk"
    r"|number$|row|place"
)
_CHECKSUM = re.compile(r"checksum|digest|crc|hash|fingerprint|_mac|^mac|signature|seal")
_FENCE = re.compile(
    r"fenc|token$|floor|lease|epoch|quorum|vote|agreed|revision|serial|holder|generation|incarnation"
    r"|attempt|session|stale|expired|deadline|participat|committed"
)
_OTHER_AXIS = {
    "pp": "dp_shard",
    "dp_replicate": "dp_shard",
    "dp_shard": "dp_replicate",
    "cp": "tp",
    "tp": "cp",
    "expert_shard": "ep",
    "ep": "etp",
    "etp": "ep",
}
_OTHER_OPERATION = {"SUM": "MAX", "MAX": "SUM", "MIN": "MAX", "AVG": "SUM"}
_OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}
_OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_NARROWER = {"float64": "float32", "float32": "bfloat16", "int64": "int32"}


@dataclass(frozen=True)
class Operator:
    """A kind of mistake."""

    name: str
    meaning: str
    precedent: str
    """A public fault of this kind, where one is known."""
    find: Callable[[Tree], Iterator[Edit]]


def _dropped_collectives(tree: Tree) -> Iterator[Edit]:
    for statement, call in tree.call_statements():
        if _is_collective(call):
            yield tree.edit((statement, ast.Pass()))
    for call in tree.calls():
        name = called_name(call)
        if isinstance(tree.parent_of(call), ast.Expr) or not call.args:
            continue
        own = ast.unparse(call.args[0])
        if re.match(r"all_gather_(bytes|ints)$", name):
            yield tree.edit((call, expression(f"[{own}]")))
        elif re.match(r"(broadcast_(bytes|int)|all_reduce_(numbers)?)$", name):
            yield tree.edit((call, expression(own)))


def _doubled_collectives(tree: Tree) -> Iterator[Edit]:
    for call in tree.calls():
        if not _SUM.match(called_name(call)) or "ReduceOp" in ast.unparse(call):
            continue
        source, parent = ast.unparse(call), tree.parent_of(call)
        if isinstance(parent, ast.Expr):
            twice = ast.parse(f"if True:\n    {source}\n    {source}").body[0]
            yield tree.edit((parent, twice))
        elif called_name(call) == "all_reduce_":
            yield tree.edit((call, expression(f"{called(call)}({source})")))


def _wrong_axes(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.Constant, ast.Attribute, ast.keyword):
        if isinstance(node, ast.Constant) and node.value in _OTHER_AXIS:
            yield tree.edit((node, ast.Constant(_OTHER_AXIS[str(node.value)])))
        elif isinstance(node, ast.Attribute) and node.attr in _OTHER_AXIS:
            other = ast.Attribute(node.value, _OTHER_AXIS[node.attr], node.ctx)
            yield tree.edit((node, other))
        elif isinstance(node, ast.keyword) and node.arg == "group":
            call = tree.parent_of(node)
            if isinstance(call, ast.Call) and _is_collective(call):
                world = ast.keyword("group", ast.Constant(None))
                yield tree.edit((node, world))


def _wrong_operations(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr in _OTHER_OPERATION and ast.unparse(node.value).endswith("ReduceOp"):
            other = ast.Attribute(node.value, _OTHER_OPERATION[node.attr], node.ctx)
            yield tree.edit((node, other))
    for call in tree.calls():
        if called(call) in _OTHER_FUNCTION and mentions(call, _PARALLEL):
            yield tree.edit((call.func, ast.Name(_OTHER_FUNCTION[called(call)], ast.Load())))
        elif called(call) == "dist.all_reduce" and "ReduceOp" not in ast.unparse(call):
            maximum = ast.keyword("op", expression("dist.ReduceOp.MAX"))
            other = ast.Call(call.func, call.args, [*call.keywords, maximum])
            yield tree.edit((call, other))


def _wrong_divisors(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.BinOp):
        assert isinstance(node, ast.BinOp)
        if (isinstance(node.op, ast.Div) and mentions(node.right, _COUNT)) or (
            isinstance(node.op, ast.FloorDiv) and mentions(node.right, _COUNT, _PARALLEL)
        ):
            yield tree.edit((node, node.left))
    for node in tree.nodes(ast.AugAssign):
        assert isinstance(node, ast.AugAssign)
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            yield tree.edit((node, ast.Pass()))
    for statement, call in tree.call_statements():
        if re.match(r"_?(foreach_)?(div|mul)_$", called_name(call)):
            yield tree.edit((statement, ast.Pass()))


def _swapped_statements(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.Expr, ast.Assign, ast.AugAssign):
        assert isinstance(node, ast.stmt)
        after = tree.next_to(node)
        if not isinstance(after, ast.Expr | ast.Assign | ast.AugAssign) or is_docstring(after):
            continue
        if not all(map(_is_change, (node, after))) or not isinstance(node, ast.Expr):
            continue
        if assigned_names(node) & set(names(after)) or assigned_names(after) & set(names(node)):
            continue
        yield tree.edit((node, after), (after, node))


def _off_by_one(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.Compare, ast.BinOp, ast.Slice):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER_COMPARISON:
            if mentions(node, _INDEX, _PARALLEL):
                first = _OTHER_COMPARISON[type(node.ops[0])]()
                other = ast.Compare(node.left, [first, *node.ops[1:]], node.comparators)
                yield tree.edit((node, other))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            if isinstance(node.right, ast.Constant) and node.right.value == 1:
                yield tree.edit((node, node.left))
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None and mentions(bound, _INDEX, _COUNT):
                    yield tree.edit((bound, ast.BinOp(bound, ast.Add(), ast.Constant(1))))


def _missing_synchronizations(tree: Tree) -> Iterator[Edit]:
    for statement, call in tree.call_statements():
        if _SYNCHRONIZATION.match(called_name(call)):
            yield tree.edit((statement, ast.Pass()))


def _removed_waits(tree: Tree) -> Iterator[Edit]:
    for statement, call in tree.call_statements():
        if _WAIT.match(called_name(call)):
            yield tree.edit((statement, ast.Pass()))


def _negated_conditions(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.If, ast.IfExp):
        assert isinstance(node, ast.If | ast.IfExp)
        if mentions(node.test, _PARALLEL) and not mentions(node.test, _FENCE):
            yield tree.edit((node.test, ast.UnaryOp(ast.Not(), node.test)))


def _ignored_checksums(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.Compare):
        assert isinstance(node, ast.Compare)
        if isinstance(node.ops[0], ast.Eq | ast.NotEq) and mentions(node, _CHECKSUM):
            yield tree.edit((node, ast.Constant(isinstance(node.ops[0], ast.Eq))))
    for call in tree.calls():
        if called_name(call) == "compare_digest":
            yield tree.edit((call, ast.Constant(True)))
    for statement, call in tree.call_statements():
        if re.match(r"_?(check|verify)(_|$)", called_name(call)):
            yield tree.edit((statement, ast.Pass()))


def _narrowed_dtypes(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr in _NARROWER and ast.unparse(node.value) == "torch":
            yield tree.edit((node, ast.Attribute(node.value, _NARROWER[node.attr], node.ctx)))
    for call in tree.calls():
        is_cast = called_name(call) in ("float", "double") and not call.args
        if is_cast and isinstance(call.func, ast.Attribute):
            yield tree.edit((call, call.func.value))


def _ignored_fences(tree: Tree) -> Iterator[Edit]:
    for node in tree.nodes(ast.If, ast.BoolOp):
        if isinstance(node, ast.If) and mentions(node.test, _FENCE):
            if isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
                yield tree.edit((node.test, ast.Constant(False)))
        elif isinstance(node, ast.BoolOp):
            for operand in node.values:
                if mentions(operand, _FENCE):
                    yield tree.edit((operand, ast.Constant(isinstance(node.op, ast.And))))


def _stale_states(tree: Tree) -> Iterator[Edit]:
    for statement, call in tree.call_statements():
        if _INVALIDATION.match(called_name(call)):
            yield tree.edit((statement, ast.Pass()))
    for node in tree.nodes(ast.Assign):
        assert isinstance(node, ast.Assign)
        is_reset = tree.function_of(node) != "__init__" and _is_empty(node.value)
        if is_reset and isinstance(node.targets[0], ast.Attribute):
            yield tree.edit((node, ast.Pass()))


def _is_collective(call: ast.Call) -> bool:
    return bool(_COLLECTIVE.match(called_name(call))) and not called(call).startswith("torch.")


def _is_change(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Call) and _CHANGE.search(called_name(node))
        for node in ast.walk(statement)
    )


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value in (None, 0, False)
    return ast.unparse(value) in ("[]", "{}", "()", "set()")


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "collective-dropped",
        "a collective is not called",
        "NVIDIA/Megatron-LM#1446",
        _dropped_collectives,
    ),
    Operator(
        "collective-doubled",
        "a sum over ranks is made twice",
        "NVIDIA/Megatron-LM#7452",
        _doubled_collectives,
    ),
    Operator(
        "wrong-axis",
        "another mesh axis, or the group of all ranks",
        "ByteDance-Seed/VeOmni#1115",
        _wrong_axes,
    ),
    Operator("wrong-operation", "another reduction", "", _wrong_operations),
    Operator(
        "wrong-divisor",
        "a division is left out",
        "meta-pytorch/torchtune#2420",
        _wrong_divisors,
    ),
    Operator("order-swapped", "two changes of state are exchanged", "", _swapped_statements),
    Operator(
        "off-by-one",
        "a bound, an index or a comparison differs by one",
        "verl-project/verl#7401",
        _off_by_one,
    ),
    Operator(
        "not-synchronized",
        "a gradient, a buffer or a file is not passed on",
        "pytorch/torchtitan#596",
        _missing_synchronizations,
    ),
    Operator(
        "wait-removed", "nothing waits for an operation", "pytorch/pytorch#195281", _removed_waits
    ),
    Operator("condition-negated", "a condition on ranks or steps", "", _negated_conditions),
    Operator("checksum-ignored", "a checksum or a check decides nothing", "", _ignored_checksums),
    Operator("dtype-narrowed", "a narrower data type", "", _narrowed_dtypes),
    Operator("fence-ignored", "a fence, a floor or a vote decides nothing", "", _ignored_fences),
    Operator("stale-state", "state outlives a reset", "huggingface/accelerate#4071", _stale_states),
)
