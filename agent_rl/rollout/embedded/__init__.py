"""The parts of the embedded engine: slots, KV cache, forward pass, sampling, weight loading."""
