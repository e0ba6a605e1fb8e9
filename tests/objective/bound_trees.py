"""Small random episodes, enumerated exactly: policy tokens and tool outputs, before and after a policy update.

A tree's node is a policy token or a tool output; whether an episode goes on, and with which of the two, is a function
of the prefix. `before` is what rollouts are drawn from, (mu, P); `after` is the policy to judge and the tools it
meets, (pi, P'). A path is one whole episode. Rewards lie in [0, 1], so that 2 xi = 1.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
Path = tuple["Step", ...]


@dataclass
class Node:
    """A choice: its distributions, [choices] each, and a child a choice (None ends the episode there).

    `replayed` is the policy that the surrogate's ratio has on top, `after` itself unless a kept set is replayed.
    """

    tool: bool
    turn: int
    before: Array
    after: Array
    replayed: Array
    children: list["Node | None"]


@dataclass(frozen=True)
class Step:
    """One node on a path and the choice taken there: probabilities of the choice, distances of the node.

    `distance`: total variation before to after, `to_replayed` and `from_replayed` to and from `replayed`; `lost`: mass
    of `after` where `before` is 0; `later`: expected distance behind the choice, under `before`.
    """

    tool: bool
    turn: int
    before: float
    after: float
    replayed: float
    distance: float
    to_replayed: float
    from_replayed: float
    lost: float
    later: float

    @property
    def ratio(self) -> float:
        return self.replayed / self.before if self.before else 1.0


@dataclass
class Tree:
    """The enumerated episodes of a tree."""

    root: Node
    paths: list[Path] = field(init=False)
    _laws: dict[tuple[str, str], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = list(_paths(self.root, ()))

    @property
    def turns(self) -> int:
        return 1 + max(step.turn for path in self.paths for step in path)

    def law(self, policy: str = "before", tools: str = "before") -> Array:
        """Probability of each path, [paths]."""
        names = {False: policy, True: tools}
        if (policy, tools) not in self._laws:
            laws = [math.prod(getattr(s, names[s.tool]) for s in path) for path in self.paths]
            self._laws[policy, tools] = np.array(laws)
        return self._laws[policy, tools]

    def mean(self, value: Callable[[Path], float], policy: str = "before", tools: str = "before") -> float:
        """The expectation of a function of the path."""
        return float(self.law(policy, tools) @ np.array([value(path) for path in self.paths]))

    def largest(self, tool: bool, turn: int) -> float:
        """The largest distance of a node of a turn that the rollouts can reach."""
        found = [0.0]
        for path in self.paths:
            for i, step in enumerate(path):
                if step.tool == tool and step.turn == turn and all(s.before > 0 for s in path[:i]):
                    found.append(step.distance)
        return max(found)


def _paths(node: Node, prefix: Path) -> Iterator[Path]:
    for i, child in enumerate(node.children):
        step = Step(
            node.tool,
            node.turn,
            float(node.before[i]),
            float(node.after[i]),
            float(node.replayed[i]),
            distance=variation(node.before, node.after),
            to_replayed=variation(node.before, node.replayed),
            from_replayed=variation(node.replayed, node.after),
            lost=float(node.after[node.before == 0].sum()),
            later=cost(child),
        )
        if child is None:
            yield (*prefix, step)
        else:
            yield from _paths(child, (*prefix, step))


def variation(p: Array, q: Array) -> float:
    """Total variation distance."""
    return 0.5 * float(np.abs(p - q).sum())


def cost(node: Node | None) -> float:
    """Expected total variation from a node on, over tokens and tools, under `before`."""
    if node is None:
        return 0.0
    behind = sum(p * cost(child) for p, child in zip(node.before, node.children, strict=True) if p > 0)
    return variation(node.before, node.after) + behind


@dataclass(frozen=True)
class Shape:
    """What random trees are like. `support`: full, truncated (mu leaves tokens out) or replayed (and so does pi~)."""

    turns: int = 2
    tokens: int = 2
    same_tools: bool = False
    tools_dominated: bool = False
    """Whether P' stays where P has mass."""
    support: str = "full"


def random_tree(rng: np.random.Generator, shape: Shape) -> Tree:
    """A tree with a random amount of mismatch, from slight to disjoint."""
    spread = float(rng.choice([0.1, 1.0, 6.0]))
    root = _token(rng, shape, spread, 0, 0)
    assert root is not None
    return Tree(root)


def _token(rng: np.random.Generator, shape: Shape, spread: float, turn: int, index: int) -> Node | None:
    """A policy token; after it another one, a tool's answer, or the end."""
    size = int(rng.integers(2, 4))
    logits = rng.normal(0, rng.choice([0.5, 3.0]), size)
    after = _softmax(logits + rng.normal(0, spread, size))
    before, kept = _softmax(logits), np.ones(size, bool)
    if shape.support != "full":
        kept[rng.permutation(size)[: int(rng.integers(0, size))]] = False
        before = np.where(kept, before, 0) / before[kept].sum()
    replayed = np.where(kept, after, 0) / after[kept].sum() if shape.support == "replayed" else after
    children = [_behind(rng, shape, spread, turn, index) for _ in range(size)]
    return Node(False, turn, before, after, replayed, children)


def _behind(rng: np.random.Generator, shape: Shape, spread: float, turn: int, index: int) -> Node | None:
    if rng.random() < 0.15:
        return None
    if index + 1 < shape.tokens and rng.random() < 0.75:
        return _token(rng, shape, spread, turn, index + 1)
    return _tool(rng, shape, spread, turn) if turn + 1 < shape.turns else None


def _tool(rng: np.random.Generator, shape: Shape, spread: float, turn: int) -> Node:
    size = int(rng.integers(1, 4))
    logits = rng.normal(0, 2, size)
    before = _softmax(logits)
    after = before if shape.same_tools else _softmax(logits + rng.normal(0, spread, size))
    if size > 1 and not shape.same_tools and not shape.tools_dominated and rng.random() < 0.3:
        before = before.copy()
        before[0] = 0
        before /= before.sum()
    children = [_token(rng, shape, spread, turn + 1, 0) if rng.random() < 0.9 else None for _ in range(size)]
    return Node(True, turn, before, after, after, children)


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    found: Array = weights / weights.sum()
    return found


def token(turn: int, before: list[float], after: list[float], *children: Node | None) -> Node:
    """A policy token written by hand; children that are not given end the episode."""
    return _written(False, turn, before, after, children)


def tool(turn: int, before: list[float], after: list[float], *children: Node | None) -> Node:
    """A tool's answer written by hand."""
    return _written(True, turn, before, after, children)


def _written(is_tool: bool, turn: int, before: list[float], after: list[float], children: tuple) -> Node:
    p, q = np.array(before, float), np.array(after, float)
    padded = [*children, *[None] * (len(p) - len(children))]
    return Node(is_tool, turn, p, q, q, padded)
