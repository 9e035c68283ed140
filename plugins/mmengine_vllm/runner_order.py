"""Lists a step's rows in the order of the model runner's tokens."""

from array import array

from mmengine_vllm.columns import int32_bytes
from mmengine_vllm.entries import Result, Step

PART = 32  # number of names in a chunk; chunks are compared as a whole
MOST_LEFT = 1000  # RunnerOrder remembers about this many requests that are in no recent step.


class RunnerOrder:
    """Lists a step's rows in the order of the model runner's batch. Reuses the previous list where the batch
    did not change.
    """

    def __init__(self) -> None:
        # Each request's row, from the steps whose outputs arrived. Requests that left stay here for a while.
        self._row_of: dict[str, int] = {}
        # From the last call of `column`: the names in chunks of PART names, and the rows.
        self._parts, self._column = list[list[str]](), bytearray()
        self._is_stale = False  # whether a request's row has changed since that call

    def rows_of(self, result: Result) -> bytes:
        """Return a result's rows as int32 bytes, in the order of the result's tokens. Call this for each
        result, in order.
        """
        self.arrived(result.step)
        return result.rows if result.names is None else self.column(result.step, result.names)

    def arrived(self, step: Step) -> None:
        """Record the rows of the step's admitted requests. Call this for each step, in order."""
        if not step.admitted:
            return
        first = len(step.ids) - step.admitted
        for name, row in zip(step.ids[first:], array("i", step.rows[first * 4 :]), strict=True):
            self._is_stale |= name in self._row_of
            self._row_of[name] = row
        if len(self._row_of) > 2 * len(step.ids) + MOST_LEFT:
            self._forget_others(step)

    def column(self, step: Step, names: list[str]) -> bytes:
        """Return the rows for `names` as int32 bytes. `names`: the requests in `step`, in any order. `step`
        must be the last step that arrived. Raises KeyError for other names.
        """
        if self._is_stale:
            self._begin_anew()
        try:
            self._follow(names)
        except KeyError:  # `_forget_others` dropped a request that was in no step for a while
            self._forget_others(step)
            self._begin_anew()
            self._follow(names)
        return bytes(self._column)

    def _begin_anew(self) -> None:
        self._parts, self._column, self._is_stale = [], bytearray(), False

    def _forget_others(self, step: Step) -> None:
        self._row_of = dict(zip(step.ids, array("i", step.rows), strict=True))

    def _follow(self, names: list[str]) -> None:
        """Update the rows in the chunks whose names changed."""
        parts, column, row_of = self._parts, self._column, self._row_of
        count = (len(names) + PART - 1) // PART
        del parts[count:]
        parts += [[]] * (count - len(parts))
        begin = 0
        for place, before in enumerate(parts):
            part = names[begin : begin + PART]
            if part != before:
                column[begin * 4 : (begin + PART) * 4] = int32_bytes([row_of[name] for name in part])
                parts[place] = part
            begin += PART
        del column[len(names) * 4 :]
