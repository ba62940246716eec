"""Without a GPU, Triton's kernels run in its interpreter. It has to know before anything imports it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
