"""Is an answer the reference answer? Extraction, an exact path in this process, math-verify in killable ones."""
