"""Writes data/families.json: what transformers makes of the tiny models in families.py.

    python -m tests.make_family_goldens

needs torch and transformers (the extra `convert`), and neither jax nor this package's models. Run
it when families.py changes.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from tests import families


def load(folder):
    """transformers' model of a folder, in fp32; attention written out, as softcaps need it."""
    import torch
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    return model.eval()


def logits(model, tokens):
    """Logits `[T, V]` of one row, in one forward."""
    import torch

    with torch.no_grad():
        out = model(torch.tensor(np.asarray(tokens)[None].astype(np.int64)), use_cache=False)
    return out.logits[0].numpy()


def padded_logits(model, rows):
    """Logits of each row out of one left-padded batch."""
    import torch

    width = max(map(len, rows))
    ids, mask = np.zeros((2, len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    position = np.maximum(np.cumsum(mask, 1) - 1, 0)
    with torch.no_grad():
        out = model(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            position_ids=torch.tensor(position),
            use_cache=False,
        )
    return [out.logits[i, width - len(row) :].numpy() for i, row in enumerate(rows)]


def cached_logits(model, tokens, prompt):
    """Logits of one row, its first `prompt` tokens in one forward, then one token at a time."""
    import torch

    found, past = [], None
    ids = torch.tensor(np.asarray(tokens)[None].astype(np.int64))
    for part in (ids[:, :prompt], *(ids[:, t : t + 1] for t in range(prompt, ids.shape[1]))):
        with torch.no_grad():
            out = model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        found.append(out.logits[0].numpy())
    return np.concatenate(found)


def golden(name, folder):
    """Rounded logits of one model: in one forward, and cached where that is another function."""
    folder, rows = families.write(Path(folder), name), families.rows()
    # Dynamic RoPE leaves a model changed by what it has seen: a fresh one for each row.
    full = [logits(load(folder), row) for row in rows]
    cached = [
        cached_logits(load(folder), row, prompt)
        for row, prompt in zip(rows, families.PROMPTS, strict=True)
    ]
    found = {"full": full}
    if "dynamic" in name:
        found["cached"] = cached
    else:
        for other in (cached, padded_logits(load(folder), rows)):
            assert max(np.abs(a - b).max() for a, b in zip(full, other, strict=True)) < 2e-5
    return {key: [np.round(x.astype(float), 5).tolist() for x in xs] for key, xs in found.items()}


def main():
    """Writes the file, one model a line."""
    lines = []
    for name in families.CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(f"{json.dumps(name)}: {json.dumps(golden(name, folder))}")
    families.GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
