"""The wave gate opens only when everybody live waits, and in the order of the ids."""

import asyncio

from agent_rl.rollout.wave import WaveGate


def test_members_are_released_together_and_in_order() -> None:
    log: list[tuple[int, int]] = []

    async def member(gate: WaveGate, number: int, turns: int, delay: float) -> None:
        for turn in range(turns):
            await gate.wait(number)
            log.append((turn, number))
            await asyncio.sleep(delay)
        gate.leave(number)

    async def scenario() -> None:
        gate = WaveGate()
        plan = {3: (1, 0.0), 1: (3, 0.02), 2: (2, 0.01)}
        for number in plan:
            gate.join(number)
        await asyncio.gather(*(member(gate, n, turns, delay) for n, (turns, delay) in plan.items()))

    asyncio.run(scenario())
    assert log == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)]


def test_a_cancelled_member_does_not_hold_the_others() -> None:
    async def scenario() -> list[int]:
        gate, done = WaveGate(), list[int]()
        for number in (1, 2):
            gate.join(number)

        async def member() -> None:
            await gate.wait(1)
            done.append(1)

        waiting = asyncio.create_task(member())
        await asyncio.sleep(0)
        gate.leave(2)
        await waiting
        return done

    assert asyncio.run(scenario()) == [1]
