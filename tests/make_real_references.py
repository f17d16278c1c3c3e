"""Writes data/real_models.json: what transformers makes of real models, at 512 positions of each.

    python -m tests.make_real_references ASSETS

needs torch and transformers (the extra `convert`) and the folder that tools/fetch_real_assets.py
has filled, with --gemma.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).parent / "data/real_models.json"
MODELS = ("SmolLM2-135M-Instruct", "gemma-3-270m")
TOKENS, POSITIONS = 640, 512  # More tokens than Gemma's window of 512.


def reference(folder):
    """The likeliest and the next token's log-prob at the last POSITIONS of a row of TOKENS."""
    import tokenizers
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = (ROOT / "LICENSE").read_text()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = json.loads((folder / "config.json").read_text())["bos_token_id"]
    ids = [bos, *tokenizer.encode(text, add_special_tokens=False).ids][:TOKENS]
    row = torch.tensor([ids])
    with torch.no_grad():
        hidden = model.model(row, use_cache=False).last_hidden_state[0]
        top_ids, top_logp, next_logp = [], [], []
        for t in range(TOKENS - 1 - POSITIONS, TOKENS - 1):
            logp = torch.log_softmax(model.lm_head(hidden[t]), -1)
            top_ids.append(int(logp.argmax()))
            top_logp.append(round(float(logp.max()), 5))
            next_logp.append(round(float(logp[ids[t + 1]]), 5))
    return {"ids": ids, "top_ids": top_ids, "top_logp": top_logp, "next_logp": next_logp}


def main():
    """Writes the file, one model a line."""
    assets = Path(sys.argv[1])
    lines = [f"{json.dumps(name)}: {json.dumps(reference(assets / name))}" for name in MODELS]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
