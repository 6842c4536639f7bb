"""A lossy network in user space: routes IP packets between TUN devices, one for each host.

argv: names of TUN devices; host number i (from 1) has the address 10.77.0.i. On stdin: "cut 1 2",
"heal", "loss 0.1"; each is answered by "ok". A program of its own, so that it shares no lock with
the tests.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def open_tun(name: str) -> int:
    """Make a TUN device; it lives as long as the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def main(names: list[str]) -> None:
    """Route until stdin ends."""
    devices = {number: open_tun(name) for number, name in enumerate(names, 1)}
    numbers = {fd: number for number, fd in devices.items()}
    chance, loss, cuts = random.Random(0), 0.0, set()
    poll = select.poll()
    for fd in [0, *numbers]:
        poll.register(fd, select.POLLIN)
    print("ok", flush=True)
    while True:
        for fd, _ in poll.poll():
            if fd == 0:
                words = os.read(0, 256).decode().split()
                if not words:
                    return
                if words[0] == "cut":
                    cuts.add(frozenset(map(int, words[1:])))
                elif words[0] == "heal":
                    cuts.clear()
                else:
                    loss = float(words[1])
                print("ok", flush=True)
                continue
            for _ in range(64):
                try:
                    packet = os.read(fd, 1 << 16)
                except OSError:  # no more, or the device is down
                    break
                if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:19] != b"\x0aM\x00":
                    continue
                target = devices.get(packet[19])
                if target is None or frozenset((numbers[fd], packet[19])) in cuts:
                    continue
                if loss and chance.random() < loss:
                    continue
                try:
                    os.write(target, packet)
                except OSError:  # it does not keep up: as on any network
                    continue


if __name__ == "__main__":
    main(sys.argv[1:])
