"""Shared by the tests of the Python package: a seeded generator, a cache and queries, and which tests need a GPU."""

import numpy as np
import pytest
from support import DIM, Q_HEADS, filled_cache, normal

import halftone as ht


@pytest.fixture
def rng():
    return np.random.default_rng(20240611)


@pytest.fixture
def cache(rng):
    return filled_cache(rng, [40, 64], max_len=64)[0]


@pytest.fixture
def q(rng):
    return normal(rng, 2, Q_HEADS, DIM)


def pytest_collection_modifyitems(items):
    gpu = None
    for item in items:
        if item.get_closest_marker("gpu"):
            if gpu is None:
                gpu = _gpu_reason()
            if gpu:
                item.add_marker(pytest.mark.skip(reason=gpu))


def _gpu_reason():
    """Why the GPU tests cannot run, or an empty text."""
    if not ht.has_cuda:
        return "this build has no CUDA backend"
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "no GPU of compute capability 9.0"
    return ""
