"""Judges answers: extraction, an exact path in this process, math-verify in processes that can be killed."""
