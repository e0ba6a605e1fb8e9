"""Asynchronous reinforcement learning for multi-turn, tool-using math agents."""
