"""Sweeps: many runs of one config that differ in a few keys and in their seed."""
