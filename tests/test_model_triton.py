"""The whole model on the Triton kernels, one short prompt: interpreted where there is no GPU, compiled where there is one.

tests/test_golden.py runs every prompt on the kernels of a GPU; this shows on any machine that weights, rows and steps fit.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels import backend
from model.runner import Runner
from tests import golden

torch.set_num_threads(1)


@pytest.mark.usefixtures(triton_backend.__name__)
@pytest.mark.parametrize("name", golden.CASES)
def test_one_prompt_on_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "choose", lambda device: backend.active())
    case = golden.case(name)
    model = Runner(golden.model_dir(name), str(DEVICE), page_tokens=golden.PAGE_TOKENS, num_pages=8, num_slots=3)
    assert backend.active().triton
    ids, tokens = golden.prompt(name, "len1")
    logits = golden.logits_in_chunks(model, ids, [1])
    stored = torch.from_numpy(case.t["len1.last_logits"].copy())
    limits = case.js["tolerance"][case.js["default_profile"]]
    assert (logits[0] - stored).square().mean().sqrt() <= limits["last_rms"]
    assert int(logits[0].argmax()) == tokens[0]
