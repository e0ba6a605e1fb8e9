"""Which sequence holds which slot of the KV cache, and how much of it is computed."""

import heapq
from collections import OrderedDict

import numpy as np

from agent_rl.records import IntArray


class Slots:
    """`num_slots` rows of up to `max_tokens` tokens; an idle sequence keeps its row until someone needs it.

    `tokens` is int32 [slots, max_tokens]. Of row i the first `length[i]` tokens are known, and those before
    `computed[i]` have their keys and values in the cache; both are int64 [slots].
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        self.length = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self._free = list(range(num_slots))
        self._running: dict[int, int] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # least recently used first

    def acquire(self, sequence_id: int, token_ids: IntArray) -> int | None:
        """A slot holding `token_ids`, or None if every slot is running.

        What the sequence's own slot already has of them stays computed; the last token never counts, as
        its logits are wanted. Without a free slot, the least recently used idle sequence loses its own.
        """
        slot = self._idle.pop(sequence_id, None)
        if slot is None:
            slot = self._take()
        if slot is None:
            return None
        self._running[sequence_id] = slot
        reusable = min(int(self.computed[slot]), len(token_ids) - 1)
        differs = np.flatnonzero(self.tokens[slot, :reusable] != token_ids[:reusable])
        self.computed[slot] = differs[0] if len(differs) else reusable
        self.tokens[slot, : len(token_ids)] = token_ids
        self.length[slot] = len(token_ids)
        return slot

    def _take(self) -> int | None:
        if self._free:
            return heapq.heappop(self._free)  # the lowest: few sequences then stay in a dense block
        if not self._idle:
            return None
        _, slot = self._idle.popitem(last=False)
        self.computed[slot] = 0
        return slot

    def park(self, sequence_id: int) -> None:
        """Stop running a sequence; it keeps its slot as the most recently used idle one."""
        self._idle[sequence_id] = self._running.pop(sequence_id)

    def release(self, sequence_id: int) -> None:
        """Free the slot of an idle sequence; unknown ids are ignored."""
        slot = self._idle.pop(sequence_id, None)
        if slot is not None:
            self.computed[slot] = 0
            heapq.heappush(self._free, slot)

    def forget_computed(self) -> None:
        """Mark the whole cache as invalid; every sequence keeps its slot and tokens."""
        self.computed[:] = 0
