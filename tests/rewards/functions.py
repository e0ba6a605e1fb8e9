"""Reward functions as a user would write them, named by their dotted path in tests."""

import asyncio
import threading
import time
from typing import Any

from agent_rl.rewards.base import FinishedEpisode, Score


def length_of_answer(episode: FinishedEpisode) -> float:
    return float(len(episode.final_text or ""))


async def with_parts(episode: FinishedEpisode) -> tuple[float, dict[str, float]]:
    await asyncio.sleep(0)
    right = float(episode.prompt.answer in (episode.final_text or ""))
    return right - 0.25, {"outcome": right, "fee": -0.25}


def whole_score(episode: FinishedEpisode) -> Score:
    return Score(2.0, {"outcome": 1.0}, mask_reason="undecided")


def text_instead(episode: FinishedEpisode) -> Any:
    return "good"


def not_a_number(episode: FinishedEpisode) -> float:
    return float("nan")


def broken(episode: FinishedEpisode) -> float:
    raise ZeroDivisionError("no judge")


def too_slow(episode: FinishedEpisode) -> float:
    time.sleep(0.3)
    return 1.0


def half_a_second(episode: FinishedEpisode) -> float:
    time.sleep(0.5)
    return 1.0


RELEASED = threading.Event()


def waits_on_a_cross(episode: FinishedEpisode) -> float:
    """Goes on until it is released if the answer is x."""
    if episode.final_text == "x":
        RELEASED.wait()
    return 1.0


def fails_on_one_group(episode: FinishedEpisode) -> float:
    """Fails on the first episode of every other prompt, whatever the attempt."""
    if episode.group_id % 2 == 1 and episode.episode_id % 2 == 0:
        raise ConnectionError("the judge is away")
    return float(episode.episode_id % 2)


def fails_at_first_or_always(episode: FinishedEpisode) -> float:
    """Fails on the first attempt of every episode, and beyond that as `fails_on_one_group`."""
    if episode.attempt == 0:
        raise ConnectionError("the judge is away")
    return fails_on_one_group(episode)


def masks_some(episode: FinishedEpisode) -> Score:
    """Of groups of four: none masked in group 0 mod 3, one in 1 mod 3, three in 2 mod 3."""
    place = episode.episode_id % 4
    masked = place < {0: 0, 1: 1, 2: 3}[episode.group_id % 3]
    return Score(float(place == 3), {"outcome": float(place == 3)}, "undecided" if masked else None)


def masks_all(episode: FinishedEpisode) -> Score:
    return Score(0.0, {"outcome": 0.0}, "undecided")
