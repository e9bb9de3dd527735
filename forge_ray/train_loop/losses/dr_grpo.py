"""Dr. GRPO: GRPO without its two biases, the division by each output's length and by the group's standard deviation.

The surrogate is GRPO's (`grpo`); the sum over tokens is divided by a constant, the same for every output (`reduction: constant`), and the
advantage is r − mean(r) (`train.advantage.name: dr_grpo`). Liu et al., Understanding R1-Zero-like training (arXiv 2503.20783), §3.2 and
appendix; TRL's `loss_type="dr_grpo"` divides by rows × max_completion_length. `train.loss.constant` is for one optimizer update: the
largest number of tokens that its rollouts may sample together.
"""

from __future__ import annotations

from forge_ray.train_loop.losses import grpo

per_token = grpo.per_token
