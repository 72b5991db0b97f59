"""Shared by the tests of the integrations: models are made once, and nothing is fetched from anywhere."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # such small models gain nothing from threads that wait for each other

import functools

import models
import pytest

from halftone.transformers import register

register()


@functools.cache
def made(name):
    return models.make(getattr(models, name))


@pytest.fixture(params=list(models.FAMILIES))
def model(request):
    return made(request.param)


@pytest.fixture
def llama():
    return made("llama")


@pytest.fixture
def mistral():
    return made("mistral")


@pytest.fixture
def gemma3n():
    return made("gemma3n")


@pytest.fixture
def gpt_oss():
    return made("gpt_oss")
