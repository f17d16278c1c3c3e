"""opd_jax: GRPO and on-policy distillation of language models, with every FLOP counted."""
