"""The units of a plan as a tree: units with the units inside them, and equal neighbors in one node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hf_fsdp_plugin.plan.modules import ancestors, parent_of
from hf_fsdp_plugin.plan.units import UnitPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitNode:
    """Consecutive equal units, with the units inside each of them.

    Attributes:
        name: the module, relative to the unit around it; ``layers.0 to layers.31`` for several; empty for the root.
        num_units: number of these units in one unit around them.
        num_params: parameters of one of them, without those of the units inside it.
    """

    name: str
    class_name: str
    num_units: int
    num_params: int
    children: tuple[UnitNode, ...] = ()

    @property
    def total(self) -> int:
        """Parameters of all these units, with those of the units inside them."""
        return self.num_units * (self.num_params + sum(child.total for child in self.children))

    def nodes(self) -> Iterator[UnitNode]:
        """Yield this node and all inside it."""
        yield self
        for child in self.children:
            yield from child.nodes()


def unit_tree(units: Sequence[UnitPlan]) -> UnitNode:
    """Return the root with everything inside it. The units of a node are in the order of the plan."""
    by_module = {name: unit.name for unit in units for name in unit.modules if name}
    inside: defaultdict[str, list[UnitPlan]] = defaultdict(list)
    root = next((unit for unit in units if not unit.name), None)
    for unit in units:
        if unit is not root:
            around = ancestors(parent_of(unit.modules[0]))
            inside[next((by_module[path] for path in around if path in by_module), "")].append(unit)
    num_params, class_name = (root.num_params, root.class_name) if root is not None else (0, "")
    children = tuple(_merged([_node(unit, "", inside) for unit in inside[""]]))
    return UnitNode(name="", class_name=class_name, num_units=1, num_params=num_params, children=children)


def _node(unit: UnitPlan, around: str, inside: dict[str, list[UnitPlan]]) -> UnitNode:
    prefix = f"{around}." if around else ""
    children = _merged([_node(child, unit.modules[0], inside) for child in inside.get(unit.name, [])])
    return UnitNode(
        name=" + ".join(name.removeprefix(prefix) for name in unit.modules), class_name=unit.class_name, num_units=1,
        num_params=unit.num_params, children=tuple(children),
    )  # fmt: skip


def _merged(nodes: Sequence[UnitNode]) -> list[UnitNode]:
    """Return the nodes with equal neighbors as one."""
    found: list[UnitNode] = []
    first = ""
    for node in nodes:
        last = found[-1] if found else None
        if last is not None and _kind(last) == _kind(node):
            found[-1] = replace(last, name=f"{first} to {node.name}", num_units=last.num_units + 1)
            continue
        first = node.name
        found.append(node)
    return found


def _kind(node: UnitNode) -> tuple[object, ...]:
    return node.class_name, node.num_params, node.children
