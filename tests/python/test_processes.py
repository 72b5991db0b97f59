"""What a process does to a call on the CPU: fork, limits of threads, Ctrl-C."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from support import DIM, Q_HEADS, check, filled_cache, normal

import halftone as ht

# What the scripts below begin with: they need processes of their own, with four threads on any machine.
_PROLOGUE = """
import multiprocessing, os, resource
import numpy as np
import halftone as ht

rng = np.random.default_rng(1)
k, v = rng.standard_normal((2, 4000, 2, 128), dtype=np.float32)
q = rng.standard_normal((4, 8, 128), dtype=np.float32)

def filled():
    cache = ht.PagedKVCache(4, 1024, kv_heads=2, head_dim=128, k_format="int4-g32")
    cache.append(k, v, [1000] * 4)
    return cache
"""


def run_script(body: str) -> str:
    """The output of a Python process, which must end well within two minutes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", _PROLOGUE + textwrap.dedent(body)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_fork_after_calls_on_many_threads():
    output = run_script("""
        cache = filled()
        plan = ht.plan(cache, q_heads=8, q_dtype="f32", workers=6)
        schedule = ht.schedule(plan, cache)

        def results():
            return b"".join(x.tobytes() for x in (
                ht.attend(q, cache, workers=5), ht.attend(q, cache, schedule=schedule), filled().pages,
                *ht.dequantize(cache)))

        def send(connection):
            connection.send_bytes(results())

        expected = results()
        assert len(os.listdir("/proc/self/task")) >= 4
        context = multiprocessing.get_context("fork")
        for _ in range(3):
            receiver, sender = context.Pipe()
            child = context.Process(target=send, args=(sender,))
            child.start()
            answered = receiver.poll(60)
            print("same" if answered and receiver.recv_bytes() == expected else f"answered: {answered}")
            child.kill()
            child.join()
        assert results() == expected
    """)
    assert output.split() == ["same"] * 3


# Root is never refused a thread, so it becomes a user without other processes.
@pytest.mark.parametrize("others", [0, 2])
def test_no_more_threads_than_the_system_allows(others):
    if others and os.geteuid() != 0:
        pytest.skip("only root can become a user whose processes are known")
    output = run_script(f"""
        root = os.geteuid() == 0
        live = len(os.listdir("/proc/self/task"))
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (live + {others} if root else 1, hard))
        if root:
            os.setuid(20000 + os.getpid() % 40000)
        out = ht.attend(q, filled(), workers=4)
        print(len(os.listdir("/proc/self/task")) - live)
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        assert np.array_equal(out, ht.attend(q, filled(), workers=4))
    """)
    assert output.split() == [str(others)]


@pytest.fixture
def ctrl_c():
    """Sends SIGINT after a while; returns when, in seconds of time.monotonic()."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    sent = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def after(seconds):
        sent.clear()
        threading.Timer(seconds, send).start()
        return sent

    yield after
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_a_long_attend(rng, ctrl_c, workers):
    tokens = 24576  # some 10 s and more, were it not for Ctrl-C
    q, k, v = normal(rng, tokens, 8, 64), normal(rng, tokens, 1, 64), normal(rng, tokens, 1, 64)
    out = np.empty_like(q)
    resident = []
    for _ in range(3):
        sent = ctrl_c(0.3)
        with pytest.raises(KeyboardInterrupt):
            ht.attend(q, k=k, v=v, out=out, workers=workers)
        assert time.monotonic() - sent[0] < 1
        resident.append(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert resident[-1] - resident[0] < 1 << 24  # a leak of the workspace or the outputs would show
    few = slice(0, 200)
    out, lse = ht.attend(q[few], k=k[few], v=v[few], lse=True, workers=workers)
    check(out, lse, q[few], k[few], v[few], [200], [200])


def test_any_handler_may_end_a_call(rng):
    class Enough(Exception):
        pass

    def handler(number, frame):
        raise Enough

    before = signal.signal(signal.SIGALRM, handler)
    try:
        x = normal(rng, 16384, 8, 64)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Enough):
            ht.attend(x, k=x[:, :1], v=x[:, :1], workers=1)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_does_not_raise_ends_nothing(rng):
    cache, k, v = filled_cache(rng, [64, 40])
    q = normal(rng, 2, Q_HEADS, DIM)
    expected = ht.attend(q, cache)
    inner = []
    x = normal(rng, 4096, 8, 64)
    quiet = ht.attend(x, k=x[:, :1], v=x[:, :1], workers=1)
    before = signal.signal(signal.SIGALRM, lambda number, frame: inner.append(ht.attend(q, cache)))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        disturbed = ht.attend(x, k=x[:, :1], v=x[:, :1], workers=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert np.array_equal(quiet, disturbed)
    assert inner and all(np.array_equal(expected, x) for x in inner)
