#!/usr/bin/env python3
"""User-space WAN link between two bridges (two TAP devices): rate, delay, jitter, loss, cut.

Stand-in for `tc netem` where the kernel lacks it. Run inside the netns holding the bridges:
    wan.py TAP_A TAP_B CONTROL.json STATS.json
CONTROL.json: {"up":true,"rate_mbit":100,"delay_ms":20,"jitter_ms":0,"loss":0.01,"queue_ms":100}
delay_ms is ONE WAY (RTT = 2*delay). Re-read whenever its mtime changes (polled every 50 ms).
"""

import collections
import fcntl
import json
import os
import random
import select
import signal
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def tap(name):
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


class Dir:  # one direction of the link
    def __init__(s, src, dst):
        s.src, s.dst, s.q, s.free = src, dst, collections.deque(), 0.0
        s.pk = s.by = s.lost = s.tail = s.cut = 0


def main(a, b, ctl, stats):
    fa, fb = tap(a), tap(b)
    d = {fa: Dir(fa, fb), fb: Dir(fb, fa)}
    cfg, mtime, last = {}, 0, 0.0

    def load():
        nonlocal mtime, cfg
        try:
            m = os.stat(ctl).st_mtime_ns
            if m != mtime:
                c = json.load(open(ctl))
                mtime = m
                cfg = c
        except (OSError, ValueError):
            pass

    load()
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    rnd, mono, read, write = random.random, time.monotonic, os.read, os.write
    while not stop:
        now = mono()
        if now - last > 0.05:
            last = now
            load()
            json.dump(
                [
                    {k: getattr(x, k) for k in ("pk", "by", "lost", "tail", "cut")}
                    for x in d.values()
                ],
                open(stats + ".t", "w"),
            )
            os.replace(stats + ".t", stats)
        up = cfg.get("up", True)
        rate = cfg.get("rate_mbit", 0) * 1e6 / 8
        delay = cfg.get("delay_ms", 0) / 1e3
        jit = cfg.get("jitter_ms", 0) / 1e3
        loss = cfg.get("loss", 0.0)
        qmax = cfg.get("queue_ms", 100) / 1e3
        wait = 0.05
        for x in d.values():
            q = x.q
            while q and q[0][0] <= now:
                t, f = q.popleft()
                if up:
                    try:
                        write(x.dst, f)
                    except OSError:
                        pass
                else:
                    x.cut += 1
            if q:
                wait = min(wait, max(q[0][0] - now, 0))
        r, _, _ = select.select((fa, fb), (), (), wait)
        now = mono()
        for fd in r:
            x = d[fd]
            for _ in range(64):
                try:
                    f = read(fd, 65600)
                except BlockingIOError:
                    break
                if not up:
                    x.cut += 1
                    continue
                if loss and rnd() < loss:
                    x.lost += 1
                    continue
                if rate:
                    start = x.free if x.free > now else now
                    if start - now > qmax:
                        x.tail += 1
                        continue  # drop-tail queue
                    x.free = start + len(f) / rate
                    t = x.free + delay
                else:
                    t = now + delay
                if jit:
                    t = max(t + rnd() * jit, x.q[-1][0] if x.q else 0)  # jitter, no reordering
                x.pk += 1
                x.by += len(f)
                x.q.append((t, f))


main(*sys.argv[1:5])
