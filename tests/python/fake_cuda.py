"""A GPU that is not there, under as much of torch as halftone.compare needs to time calls: streams, captures with what
an invalid one leaves behind in torch, and two clocks, so that a time says whether it was the host's or the kernels'."""

import types

import numpy as np

FLUSH_US, REPLAY_US = 60.0, 3.0


class Tensor(np.ndarray):
    device = "cuda:0"

    def fill_(self, value):
        self[...] = value
        return self

    def is_floating_point(self):
        return self.dtype.kind == "f"

    def element_size(self):
        return self.itemsize

    def clone(self):
        return self.copy()


def tensor(*shape, dtype=np.float32):
    return np.zeros(shape, dtype).view(Tensor)


class Stream:
    def __init__(self, device=None):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class OnStream:
    """Not a generator, which would put the stream back when it is collected."""

    def __init__(self, gpu, stream):
        self.gpu, self.stream = gpu, stream

    def __enter__(self):
        self.before, self.gpu.current = self.gpu.current, self.stream

    def __exit__(self, *error):
        self.gpu.current = self.before


class Gpu:
    """``launch`` is what a package's code calls; ``host`` and ``device`` are how far both are, in microseconds."""

    def __init__(self):
        self.host = self.device = 0.0
        self.default = self.current = Stream()
        self.capture = None  # (graph, stream) of the one that goes on
        self.is_valid = True
        self.has_error = False  # which a package left to whoever asks next, as the launches of torch do
        self.pools = []  # into which the allocator takes captures to allocate
        self.log = []

    def launch(self, kernel, us, stream=None):
        if self.has_error:
            self.has_error = False
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        stream = stream or self.current
        if self.capture is not None and stream is self.capture[1]:
            self.capture[0].nodes.append((kernel, us))
            return
        self.device = max(self.device, self.host) + us
        kernel()

    def synchronize(self, device=None):
        if self.capture is not None:
            self.is_valid = False
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        self.host = self.device = max(self.host, self.device)

    def set_stream(self, stream):
        self.current = stream

    def stream(self, stream):
        return OnStream(self, stream)

    def end_pool(self, index, pool):
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def torch(self):
        gpu = self

        class Graph:
            def __init__(self):
                self.nodes = []

            def capture_end(self):
                gpu.capture = None
                if not gpu.is_valid:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                gpu.pools.remove(self.pool)

            def replay(self):
                gpu.log.append("replay")
                gpu.host += REPLAY_US
                for kernel, us in self.nodes:
                    gpu.launch(kernel, us)

        class Capture:  # torch.cuda.graph of torch 2.11
            def __init__(self, graph, pool, stream):
                self.graph, self.stream = graph, gpu.stream(stream)
                graph.pool, self.on = pool, stream

            def __enter__(self):
                gpu.synchronize()
                if gpu.pools:  # in empty_cache()
                    raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
                self.stream.__enter__()
                gpu.pools.append(self.graph.pool)
                gpu.capture, gpu.is_valid = (self.graph, self.on), True

            def __exit__(self, *error):
                self.graph.capture_end()  # when it raises, the stream stays
                self.stream.__exit__(None, None, None)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = max(gpu.host, gpu.device)

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        class Flush:
            def zero_(self):
                gpu.log.append("flush")
                gpu.launch(lambda: None, FLUSH_US)

        cuda = types.SimpleNamespace(
            CUDAGraph=Graph, graph=Capture, Event=Event, Stream=Stream, graph_pool_handle=object, stream=self.stream,
            set_stream=self.set_stream, synchronize=self.synchronize, current_stream=lambda device: gpu.current,
            current_device=lambda: 0, is_current_stream_capturing=lambda: gpu.capture is not None,
            _sleep=lambda clocks: None,
        )  # fmt: skip
        return types.SimpleNamespace(
            cuda=cuda, uint8=np.uint8, isnan=np.isnan, empty=lambda size, dtype, device: Flush(),
            ones=lambda *shape, device: gpu.launch(lambda: None, 1.0),
            _C=types.SimpleNamespace(_cuda_endAllocateToPool=self.end_pool),
        )  # fmt: skip
