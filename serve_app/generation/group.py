"""The generations of one request: admitted all or none, read as one stream, freed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from deployments.errors import WindveError
from deployments.generation.request import Piece, WantedGeneration
from deployments.generation.router import GenerationRouter
from serve_app.generation.facts import GenerationFacts
from serve_app.observe.facts import TracedRequest


class Generations:
    """The generations of one request, each with `answers` answers. Choices are numbered across all of them."""

    def __init__(self, router: GenerationRouter, answers: int, traced: TracedRequest | None = None) -> None:
        """`traced`: gets their facts, for the access log and traces."""
        self.tokens = 0  # of all answers so far
        self._router, self._answers, self._traced = router, answers, traced
        self._begun: list[AsyncGenerator[Piece, None]] = []

    async def begin(self, wanted: Sequence[WantedGeneration]) -> None:
        """Returns once all are admitted. If one is refused, ends the others and raises the same error."""
        if self._traced is not None:
            self._traced.facts = GenerationFacts(self._router.card.name, wanted, lambda: self.tokens)
        try:
            for one in wanted:
                self._begun.append(await self._router.begin(one))
        except WindveError as error:
            for begun in self._begun:
                with suppress(WindveError):
                    await begun.athrow(error)
            raise

    async def close(self) -> None:
        """Free the slots of all generations. Call it once nobody reads `pieces` any more."""
        for one in self._begun:
            await one.aclose()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields (choice, piece) as pieces arrive. Raises the first error of any generation."""
        if len(self._begun) == 1:
            async for piece in self._begun[0]:
                self._came(piece)
                yield piece.answer, piece
            return
        found: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()
        reading = [asyncio.create_task(self._read(place, one, found)) for place, one in enumerate(self._begun)]
        left = len(reading)
        try:
            while left:
                one = await found.get()
                if isinstance(one, Exception):
                    raise one
                if one is None:
                    left -= 1
                else:
                    self._came(one[1])
                    yield one
        finally:
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)

    def _came(self, piece: Piece) -> None:
        self.tokens += len(piece.tokens)

    async def _read(
        self,
        place: int,
        pieces: AsyncGenerator[Piece, None],
        found: asyncio.Queue[tuple[int, Piece] | Exception | None],
    ) -> None:
        end: Exception | None = None
        try:
            async for piece in pieces:
                found.put_nowait((place * self._answers + piece.answer, piece))
        except Exception as error:  # noqa: BLE001 - raised again where the pieces are read
            end = error
        found.put_nowait(end)
