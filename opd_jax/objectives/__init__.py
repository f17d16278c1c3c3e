"""Losses and training signals: pure functions on arrays, no model, no text, no config object.

One loss, whatever the algorithm:

    loss = Σ_BR  w_BR · (policy_BR + β · kl_BR)          weights: `aggregate.token_weights`

    algorithm   policy term                                        signal
    sft         sft.nll_terms                                      -
    grpo        grpo.policy_gradient_terms                         grpo.group_advantages
    opd         grpo.policy_gradient_terms                         opd.sampled_token_advantage
    opd         opd.reverse_kl, forward_kl, jsd, topk_reverse_kl   the divergence is the loss

Padding is dealt with twice, both times in `aggregate`. `keep` zeroes every input at the door, so
that nothing overflows on the way (a gradient of 0 · inf is NaN, however small its weight), and
`weighted_sum` never reads a term whose weight is 0. In between, functions work token by token and
need no mask.
"""
