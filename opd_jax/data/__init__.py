"""Problems, tokenizers and the prompt pipeline.

    problems = domains.load("arithmetic", "train", levels=[1, 2], data_dir="data")
    tokenizer = load("nano")
    problems, dropped = fit_prompts(problems, tokenizer, limit=24, overflow="drop")
    quota = quotas({"arithmetic": 1.0}, prompts=32)
    stream = PromptStream({"arithmetic": problems}, quota, seed=0)
    batch = encode_prompts(next(stream), ["arithmetic"], tokenizer, buckets=[16, 24])

A domain adds no code here: see `opd_jax.domains` for how to write one. This package imports core.
"""
