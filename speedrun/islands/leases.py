"""Leases of disjoint tokens: each island trains on its own part of one stream, in the order of the leases."""

from collections.abc import Sequence

import msgspec

from speedrun.data.stream import Cursor, Shape, TokenStream


class Lease(msgspec.Struct, frozen=True):
    """The tokens of some steps."""

    number: int  #: from 0, in the order of the stream
    start: Cursor
    stop: Cursor
    shapes: tuple[Shape, ...]  #: of the batch of each step

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained on."""
        return sum(shape.num_sequences * shape.seq_len for shape in self.shapes)


class Leases:
    """Grants tokens, and grants again what comes back untrained."""

    def __init__(self, stream: TokenStream, num_granted: int = 0, returned: Sequence[Lease] = ()) -> None:
        self.stream, self.num_granted = stream, num_granted
        self.returned = list(returned)  #: whose tokens were not trained on

    def grant(self, shapes: Sequence[Shape]) -> Lease:
        """Lease tokens for batches of these shapes; raise DataError if the stream has too few."""
        wanted = tuple(shapes)
        if again := next((lease for lease in self.returned if lease.shapes == wanted), None):
            self.returned.remove(again)
            return again
        start = self.stream.cursor
        for shape in wanted:
            self.stream.batch(*shape)
        self.num_granted += 1
        return Lease(self.num_granted - 1, start, self.stream.cursor, wanted)
