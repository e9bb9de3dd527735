"""RLOO: REINFORCE on whole rollouts, with the other rollouts of the group as the baseline.

    −A_i · Σ_t log π(y_t),   A_i = r_i − mean of the other rewards (`train.advantage.name: rloo`),   averaged over the rollouts

Ahmadian et al., Back to Basics (arXiv 2402.14740), eq. 7-8, after Kool et al. 2019; the sum over tokens and the mean over rollouts are
`reduction: trajectory_sum`. There is no ratio: with more than one update per step, or stale rollouts, `importance` corrects for what
sampled the tokens. (TRL's RLOOTrainer puts a clipped ratio of whole completions in place of log π: at the first update the same gradient.)
"""

from __future__ import annotations

from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.inputs import LossInputs


def per_token(config: Loss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token (n,)."""
    return -inputs.advantages * inputs.logprobs, {}
