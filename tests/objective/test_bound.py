"""docs/bound.md by exact enumeration: every claimed inequality holds for the worst reward, every false one fails.

The error of a surrogate is linear in the reward of each path, so its largest value over rewards in [0, 1] is a sum of
the positive coefficients. Rewards lie in [0, 1] throughout: 2 xi = 1.
"""

import math
from functools import cache

import numpy as np
import pytest
from bound_trees import Array, Node, Path, Shape, Tree, random_tree, token, tool

COUNT = 200
ROUNDING = 1e-11
SAME_TOOLS = Shape(same_tools=True)
OTHER_TOOLS = Shape()
DOMINATED = Shape(turns=3, tokens=1, tools_dominated=True)
LONG = Shape(turns=1, tokens=4, same_tools=True)
FULL = [SAME_TOOLS, OTHER_TOOLS, DOMINATED, LONG]
TRUNCATED = Shape(support="truncated")
REPLAYED = Shape(support="replayed")


@cache
def trees(shape: Shape) -> list[Tree]:
    rng = np.random.default_rng(7)
    return [random_tree(rng, shape) for _ in range(COUNT)]


def tokens(path: Path) -> int:
    return sum(not s.tool for s in path)


def first_order(path: Path) -> float:
    """The sum of r - 1 over the policy's tokens."""
    return sum(s.ratio - 1 for s in path if not s.tool)


def error(tree: Tree, surrogate: Array) -> Array:
    """J(pi; P') - J(mu; P) - E[R surrogate] as coefficients of each path's reward."""
    return tree.law("after", "after") - tree.law() * (1 + surrogate)


def first_order_error(tree: Tree) -> Array:
    return error(tree, np.array([first_order(path) for path in tree.paths]))


def largest(coefficients: Array) -> float:
    """The largest |error| that a reward in [0, 1] can have."""
    return max(float(coefficients.clip(min=0).sum()), float(-coefficients.clip(max=0).sum()))


def distance(tree: Tree, tools: bool, policy_law: str = "before", tool_law: str = "before") -> float:
    """The expected sum of total variations at the policy's tokens, or at the tools' answers."""
    return tree.mean(lambda path: sum(s.distance for s in path if s.tool == tools), policy_law, tool_law)


def holds(lhs: float, rhs: float) -> bool:
    return lhs <= rhs + ROUNDING


# Statements with pi << mu


def first_order_bound(tree: Tree) -> float:
    return distance(tree, False) + distance(tree, True)


@pytest.mark.parametrize("shape", FULL)
def test_first_order(shape: Shape) -> None:
    for tree in trees(shape):
        assert holds(largest(first_order_error(tree)), first_order_bound(tree))


def second_order(tree: Tree, cap: float = 1.0) -> float:
    def cost(path: Path) -> float:
        return sum(abs(s.ratio - 1) * min(cap, s.later) for s in path if not s.tool)

    return distance(tree, True) + tree.mean(cost)


@pytest.mark.parametrize("shape", FULL)
def test_second_order(shape: Shape) -> None:
    for tree in trees(shape):
        assert holds(largest(first_order_error(tree)), second_order(tree))
        assert holds(second_order(tree), second_order(tree, math.inf))


def second_order_in_maxima(tree: Tree) -> float:
    turns = range(tree.turns)
    lengths = [max(sum(s.turn == k and not s.tool for s in path) for path in tree.paths) for k in turns]
    policy = [n * tree.largest(False, k) for k, n in enumerate(lengths)]
    tools = [tree.largest(True, k) for k in turns]
    squares = sum(x * x / n for x, n in zip(policy, lengths, strict=True) if n)
    mixed = sum(policy[k] * sum(tools[k:]) for k in turns)
    return sum(policy) ** 2 - squares + sum(tools) + 2 * mixed


@pytest.mark.parametrize("shape", FULL)
def test_second_order_in_maxima(shape: Shape) -> None:
    for tree in trees(shape):
        assert holds(largest(first_order_error(tree)), second_order_in_maxima(tree))


def shift_into(path: Path, turn: int, index: int) -> float:
    """Total variation that a path meets before token `index` of a turn."""
    total, seen = 0.0, 0
    for s in path:
        if not s.tool and s.turn == turn:
            if seen == index:
                break
            seen += 1
        if s.turn > turn:
            break
        total += s.distance
    return total


def state_shift_bound(tree: Tree) -> float:
    total = distance(tree, True, "after", "after")
    for turn in range(tree.turns):
        count = max(sum(s.turn == turn and not s.tool for s in path) for path in tree.paths)
        for index in range(count):
            shift = tree.mean(lambda path, at=(turn, index): shift_into(path, *at))
            total += 2 * tree.largest(False, turn) * min(1.0, shift)
    return total


@pytest.mark.parametrize("shape", [SAME_TOOLS, DOMINATED, LONG])
def test_state_shift(shape: Shape) -> None:
    for tree in trees(shape):
        assert holds(largest(first_order_error(tree)), state_shift_bound(tree))


def turn_terms(tree: Tree) -> Array:
    """The exact part of each turn in the error, [turns, paths]: the sum over turns is the error."""
    found = np.zeros((tree.turns, len(tree.paths)))
    for j, path in enumerate(tree.paths):
        before, after = [s.before for s in path], [s.after for s in path]
        for i, s in enumerate(path):
            behind = math.prod(after[i + 1 :]) - (0 if s.tool else math.prod(before[i + 1 :]))
            found[s.turn, j] += math.prod(before[:i]) * (s.after - s.before) * behind
    return found


def turn_distance(tree: Tree, turn: int, tools: bool) -> float:
    return tree.mean(lambda path: sum(s.distance for s in path if s.turn == turn and s.tool == tools))


@pytest.mark.parametrize("shape", FULL)
def test_a_turn_s_own_term_costs_up_to_twice_its_part_of_the_total(shape: Shape) -> None:
    exceeds = 0
    for tree in trees(shape):
        terms = turn_terms(tree)
        np.testing.assert_allclose(terms.sum(0), first_order_error(tree), atol=1e-12)
        for turn in range(tree.turns):
            policy, tools = turn_distance(tree, turn, False), turn_distance(tree, turn, True)
            assert holds(largest(terms[turn]), 2 * policy + tools)
            exceeds += not holds(largest(terms[turn]), policy + tools)
    assert exceeds or shape.turns == 1  # false: 2 xi a turn


# Statements about cut support


def test_first_order_when_mu_leaves_tokens_out() -> None:
    """With xi = max|R| on both sides; one-sided, R >= 0, the lost mass is a gain."""
    violated = 0
    for tree in trees(TRUNCATED):
        coefficients = first_order_error(tree)
        lost = tree.mean(lambda path: sum(s.lost for s in path if not s.tool))
        drift = tree.mean(lambda path: sum(abs(s.ratio - 1) for s in path if not s.tool))
        policy, tools = distance(tree, False), distance(tree, True)
        assert drift == pytest.approx(2 * policy - lost, abs=1e-12)
        assert holds(float(np.abs(coefficients).sum()), drift + 2 * tools)
        assert holds(-float(coefficients.clip(max=0).sum()), policy - lost + tools)
        violated += not holds(largest(coefficients), second_order(tree))
    assert violated > COUNT / 10  # false: second order


def test_first_order_when_the_surrogate_s_policy_is_not_the_one_deployed() -> None:
    violated = 0
    for tree in trees(REPLAYED):
        worst, tools = largest(first_order_error(tree)), distance(tree, True)
        near = tree.mean(lambda path: sum(s.to_replayed for s in path if not s.tool))
        far = tree.mean(lambda path: sum(s.from_replayed for s in path if not s.tool))
        lost = tree.mean(lambda path: sum(s.lost for s in path if not s.tool))
        assert far == pytest.approx(lost, abs=1e-12)
        assert holds(worst, near + far + tools)
        violated += not holds(worst, near + tools)
    assert violated > COUNT / 10  # false: without the term of the mass off the kept set


# GSPO


def restored(path: Path, length: float) -> float:
    """length * (rho - 1), rho the product of ratios to the power of 1 / length."""
    return length * (math.prod(s.ratio for s in path if not s.tool) ** (1 / length) - 1)


@pytest.mark.parametrize("length", [None, 1.0, 2.5, 20.0])
@pytest.mark.parametrize("shape", FULL)
def test_gspo_with_its_length_restored(shape: Shape, length: float | None) -> None:
    """The error is between lo G and hi G where tools are the same, and 0 <= G <= KL(mu, pi) over whole episodes."""
    for tree in trees(shape):
        surrogate = np.array([restored(path, length or tokens(path)) for path in tree.paths])
        gap, coefficients = -float(tree.law() @ surrogate), error(tree, surrogate)
        logs = np.array([sum(math.log(s.ratio) for s in path if not s.tool) for path in tree.paths])
        assert holds(0, gap)
        assert holds(gap, -float(tree.law() @ logs))
        assert coefficients.sum() == pytest.approx(gap, abs=1e-11)
        assert holds(-float(coefficients.clip(max=0).sum()), distance(tree, True, "after"))
        if shape.same_tools:
            assert coefficients.min() >= -ROUNDING


def test_gspo_s_gain_has_no_penalty_under_truncation() -> None:
    for tree in trees(Shape(same_tools=True, support="truncated")):
        surrogate = np.array([restored(path, tokens(path)) for path in tree.paths])
        assert error(tree, surrogate).min() >= -ROUNDING


def turn_ratio(path: Path) -> float:
    total = 0.0
    for turn in {s.turn for s in path if not s.tool}:
        ratios = [s.ratio for s in path if not s.tool and s.turn == turn]
        total += len(ratios) * (math.prod(ratios) ** (1 / len(ratios)) - 1)
    return total


@pytest.mark.parametrize("shape", FULL)
def test_turn_ratio(shape: Shape) -> None:
    for tree in trees(shape):
        turn = np.array([turn_ratio(path) for path in tree.paths])
        whole = np.array([restored(path, tokens(path)) for path in tree.paths])
        gap = -float(tree.law() @ turn)
        assert holds(0, gap)
        assert holds(gap, -float(tree.law() @ whole))
        assert holds(largest(error(tree, turn)), distance(tree, False) + distance(tree, True) + gap)


# Constants that cannot be lowered, and claims that are false


TINY = 1e-9
APART = token(0, [1 - TINY, TINY], [TINY, 1 - TINY])
"""A token on which mu and pi agree almost never."""


def sharp_tree() -> Tree:
    """The first token moves 1e-3 onto a choice that mu takes once in 1e9, behind which mu and pi are apart."""
    d = 1e-3
    return Tree(token(0, [1 - TINY, TINY], [1 - TINY - d, TINY + d], None, APART))


def test_the_first_order_constant_is_sharp() -> None:
    tree = sharp_tree()
    assert largest(first_order_error(tree)) == pytest.approx(first_order_bound(tree), rel=1e-4)


def test_the_second_order_and_the_state_shift_constants_are_sharp() -> None:
    """Two turns of a token each that do not depend on the past."""
    last = token(1, [0.8, 0.2], [0.5, 0.5])
    answer = tool(0, [1.0], [1.0], last)
    tree = Tree(token(0, [0.5, 0.5], [0.4, 0.6], answer, answer))
    worst = largest(first_order_error(tree))
    assert worst == pytest.approx(2 * 0.1 * 0.3)
    for bound in (second_order, second_order_in_maxima, state_shift_bound):
        assert bound(tree) == pytest.approx(worst)


def test_the_environment_s_constant_is_sharp_and_its_term_is_needed() -> None:
    tree = Tree(token(0, [1.0], [1.0], tool(0, [0.7, 0.3], [0.2, 0.8])))
    assert distance(tree, False) == 0
    assert largest(first_order_error(tree)) == pytest.approx(first_order_bound(tree)) == pytest.approx(0.5)


def test_the_last_token_of_an_episode_costs_in_the_first_order_bound() -> None:
    """The second-order one charges nothing for it, but has twice the constant."""
    swapped = token(0, [TINY, 1 - TINY], [1 - TINY, TINY])
    tree = Tree(token(0, [0.5, 0.5], [0.4, 0.6], APART, swapped))
    without_last = tree.mean(lambda path: path[0].distance)
    worst = largest(first_order_error(tree))
    assert worst == pytest.approx(2 * without_last, rel=1e-6)
    assert holds(worst, second_order(tree))
    assert second_order(tree) == pytest.approx(worst, rel=1e-6)


def test_gspo_needs_its_gap() -> None:
    """Three tokens; the first abandons a choice that mu takes once in a hundred. R = 1 everywhere: the error is G."""
    behind = token(0, [1.0], [1.0], token(0, [1.0], [1.0]))
    tree = Tree(token(0, [0.01, 0.99], [1e-12, 1 - 1e-12], behind, behind))
    surrogate = np.array([restored(path, 3) for path in tree.paths])
    assert error(tree, surrogate).sum() > 1.9 * distance(tree, False)


def test_gspo_as_published_can_ascend_the_wrong_way() -> None:
    """Stop at once for 0.4, or write one more token for 0.6: without the length the surrogate prefers to stop."""

    def tree(longer: float) -> Tree:
        more: Node = token(0, [1.0], [1.0])
        return Tree(token(0, [0.5, 0.5], [1 - longer, longer], None, more))

    rewards = np.array([0.4, 0.6])
    for longer in (0.51, 0.6):
        found = tree(longer)
        ratios = np.array([restored(path, tokens(path)) / tokens(path) for path in found.paths])
        lengths = np.array([tokens(path) for path in found.paths])
        assert (found.law("after") - found.law()) @ rewards > 0
        assert found.law() @ (rewards * ratios) < 0
        assert found.law() @ (rewards * ratios * lengths) > 0


def test_a_clipped_surrogate_promises_no_more_than_the_unclipped_one() -> None:
    """So the bound holds with PPO's and SAT's objective in its place, whatever the radii."""
    rng = np.random.default_rng(0)
    ratio, advantage = rng.lognormal(0, 1, 5000), rng.normal(size=5000)
    low, high = rng.uniform(0, 1, 5000), rng.uniform(0, 2, 5000)
    clipped = np.minimum(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage)
    assert (clipped - advantage <= (ratio - 1) * advantage + 1e-12).all()
