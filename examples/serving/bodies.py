"""Reads the bytes of a request's body, decompressed in pieces.

aiohttp could decompress them, but logs a traceback for damaged data.
"""

import zlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from serving.questions import BadRequest

PIECE = 1 << 20  # bytes at a time
DECODERS: dict[str, Any] = {  # by Content-Encoding
    "identity": None,
    "gzip": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "deflate": zlib.decompressobj,
}


class TooLarge(Exception):
    """A body of more bytes than the limit."""


async def pieces_of(request: web.Request, most: int) -> AsyncIterator[bytes]:
    """A body's bytes.

    Args:
      request: with any of `DECODERS` as its Content-Encoding.
      most: how many bytes are read, decompressed.

    Raises:
      BadRequest: for another Content-Encoding, and for data that are damaged or cut short.
      TooLarge: for more bytes.
    """
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in DECODERS:
        raise BadRequest(
            f"Content-Encoding: expected one of {', '.join(DECODERS)}, got {encoding!r}"
        )
    try:
        size, pieces = 0, request.content.iter_chunked(PIECE)
        if encoding != "identity":
            pieces = decompressed(pieces, encoding)
        async for piece in pieces:
            size += len(piece)
            if size > most:
                raise TooLarge(f"the body has more than {most} bytes")
            yield piece
    except (web.RequestPayloadError, zlib.error) as e:
        raise BadRequest(f"the body cannot be read: {' '.join(str(e).split())}") from None


async def decompressed(pieces: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """The same, decompressed, in pieces that are no larger."""
    decoder = DECODERS[encoding]()
    async for piece in pieces:
        while piece and not decoder.eof:
            yield decoder.decompress(piece, PIECE)
            piece = decoder.unconsumed_tail
    yield decoder.flush()
    if not decoder.eof:
        raise BadRequest(f"the body ends before its {encoding} data do")
    if decoder.unused_data:
        raise BadRequest(f"the body has more bytes after its {encoding} data")
