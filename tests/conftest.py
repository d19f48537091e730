"""Before any test imports a kernel: without a GPU they are interpreted."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
