"""The mutation operators find the mistakes that they are named after, wherever the code is."""

import ast
import json
from typing import Any

import pytest

from tests.mutants.imports import recording
from tests.mutants.operators import OPERATORS
from tests.mutants.sites import REPOSITORY, Site, draw, mutated, sites_of
from tests.mutants.table import KILLERS

CASES = [
    ("collective-dropped", "dist.all_reduce(x, group=g)", "pass"),
    ("collective-dropped", "y = mesh.all_reduce_(x)", "y = x"),
    ("collective-dropped", "y = all_gather_ints(n)", "y = [n]"),
    ("collective-doubled", "y = mesh.all_reduce_(x)", "y = mesh.all_reduce_(mesh.all_reduce_(x))"),
    ("wrong-axis", "dist.all_reduce(x, group=g)", "dist.all_reduce(x, group=None)"),
    ("wrong-axis", "size = degrees.tp", "size = degrees.cp"),
    ("wrong-axis", "mesh = device_mesh['dp_shard']", "mesh = device_mesh['dp_replicate']"),
    ("wrong-operation", "dist.all_reduce(x, ReduceOp.MAX)", "dist.all_reduce(x, ReduceOp.SUM)"),
    ("wrong-operation", "ready = all(ranks)", "ready = any(ranks)"),
    ("wrong-divisor", "loss = total / num_targets", "loss = total"),
    ("wrong-divisor", "grad.div_(world_size)", "pass"),
    ("order-swapped", "optimizer.step()\nzero_grad()", "zero_grad()\noptimizer.step()"),
    ("off-by-one", "ok = stage < last", "ok = stage <= last"),
    ("off-by-one", "x = items[start:stop]", "x = items[start + 1:stop]"),
    ("off-by-one", "cursor = step + 1", "cursor = step"),
    ("not-synchronized", "model.sync_gradients()", "pass"),
    ("wait-removed", "work.wait()", "pass"),
    ("condition-negated", "if rank == 0:\n    f()", "if not rank == 0:\n    f()"),
    ("checksum-ignored", "ok = crc == read", "ok = True"),
    ("dtype-narrowed", "y = x.to(torch.float64)", "y = x.to(torch.float32)"),
    ("fence-ignored", "if token < held:\n    return", "if False:\n    return"),
    ("stale-state", "self.cache.clear()", "pass"),
    ("stale-state", "self._pending = None", "pass"),
]


@pytest.mark.parametrize(("operator", "before", "after"), CASES)
def test_a_mistake(operator: str, before: str, after: str) -> None:
    source, wanted = module_of(before), module_of(after)
    sites = [site for site, _ in sites_of("m", source) if site.operator == operator]
    found = {ast.unparse(mutated(source, site.mutation)) for site in sites}
    assert ast.unparse(ast.parse(wanted)) in found


def test_every_operator_has_a_case() -> None:
    assert {operator for operator, _, _ in CASES} == {operator.name for operator in OPERATORS}


def test_messages_docstrings_and_annotations_are_not_mutated() -> None:
    body = 'raise ValueError(f"{step + 1}")\nlogger.info("%s", step + 1)\nx: Literal["tp"] = y'
    assert [site for site, _ in sites_of("m", module_of(body))] == []


def test_the_draw_does_not_depend_on_paths_nor_on_other_code() -> None:
    source = module_of("\n".join(before for _, before, _ in CASES))
    sites, moved = ([site for site, _ in sites_of(module, source)] for module in ("a", "b.c"))
    assert [site.id for site in sites] == [site.id for site in moved]
    assert len(draw(sites, seed=1, per_operator=1)) == len(OPERATORS)
    others = [site for site, _ in sites_of("a", source.replace("def function", "def another"))]
    of_both = [site for site in draw([*others, *sites], 1, 1) if site in sites]
    assert {site.id for site in of_both} <= {site.id for site in draw(sites, 1, 1)}


def test_a_recording_reaches_the_sites_of_executed_statements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    source = module_of("if step < last:\n    work.wait()\nelse:\n    self.clear()")
    (tmp_path / "bases.json").write_text('{"m": 10}')
    monkeypatch.setenv("MUTANT_BASES", str(tmp_path / "bases.json"))
    code = compile(recording(source, "m"), "m", "exec")
    positions: set[int] = set()
    scope: dict[str, Any] = {}
    exec(code, scope)
    scope["_reached_site"] = lambda *found: positions.update(found)
    with pytest.raises(NameError, match="work"):
        scope["Owner"]().function(step=1, last=2)
    sites: list[Site] = [site for site, _ in sites_of("m", source)]
    reached = {sites[position - 10].operator for position in positions}
    assert reached == {"off-by-one", "condition-negated", "wait-removed"}


def module_of(body: str) -> str:
    """A module with a method that has this body."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"class Owner:\n    def function(self, step=0, last=0):\n{lines}"


def test_every_known_killer_is_a_test() -> None:
    killers = {name.partition("[")[0] for name in json.loads(KILLERS.read_text()).values()}
    files = {killer.split("::")[0] for killer in killers}
    sources = {file: (REPOSITORY / file).read_text() for file in files}
    missing = [
        killer
        for killer in killers
        if f"def {killer.split('::')[-1]}(" not in sources[killer.split("::")[0]]
    ]
    assert not missing
