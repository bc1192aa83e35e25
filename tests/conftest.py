"""One compute thread per test process, no model hub, and transformers works beside a torchvision for another torch."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

from asyncrlhf.backends.torch.guard import guard_companions

guard_companions()

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
