# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The optimizers of the retrieval models, and their learning rates."""

import torch

MATRIX_LR = 4e-3
OTHER_LR = 4e-3


def make_optimizers(
    matrices: list[torch.Tensor], others: list[torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """Returns the optimizer of matrices, and that of all other weights."""
    return [
        torch.optim.Muon(
            matrices,
            lr=MATRIX_LR,
            weight_decay=0.05,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            others,
            lr=OTHER_LR,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=others[0].is_cuda,
        ),
    ]
