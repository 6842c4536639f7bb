"""A device whose memory is the host's and whose only stream is a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from flexkv._core import lib
from flexkv.backends.device import CopyingDevice
from flexkv.protocols import DeviceInfo


class ThreadDevice(CopyingDevice):
    """Copies in one thread, first come, first served."""

    name = "example"

    @classmethod
    def probe(cls):
        return [DeviceInfo("example", detail="a thread that copies")]

    def __init__(self):
        super().__init__()
        self._stream = ThreadPoolExecutor(1, "example-stream")

    def start(self, job, ticket):
        """Start the copy and return; the ticket is completed when its bytes have landed."""
        self._stream.submit(self._copy, job, ticket)

    def _copy(self, job, ticket):
        lib.fx_copy_blocks(*job.arguments())  # a real device: its own copies, on its own stream,
        lib.fx_complete(ticket.address)  # then this, as a host function of the stream

    async def aclose(self):
        await super().aclose()  # waits for the tickets
        self._stream.shutdown(wait=False)
