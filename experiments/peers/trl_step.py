"""Seconds of TRL's GRPO and on-policy distillation steps on a given work; run by compare.py.

In an environment of its own: pip install torch trl.
"""

import itertools
import json
import resource
import sys
import tempfile
import time

import datasets
import tokenizers
import torch
import transformers
import trl


def model(work: dict) -> transformers.PreTrainedModel:
    """Random weights in the given shape, fp32."""
    c = work["model"]
    config = transformers.LlamaConfig(
        vocab_size=c["vocab_size"], hidden_size=c["embed_dim"], intermediate_size=c["mlp_dim"],
        num_hidden_layers=c["num_layers"], num_attention_heads=c["num_heads"],
        num_key_value_heads=c["num_kv_heads"], head_dim=c["head_dim"],
        max_position_embeddings=c["max_length"], tie_word_embeddings=c["tie_embeddings"],
        bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.float32)


def tokenizer(work: dict) -> transformers.PreTrainedTokenizerFast:
    """Token i is the word `wi`."""
    words = {f"w{i}": i for i in range(work["model"]["vocab_size"])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="w0", pad_token="w0", padding_side="left"
    )


class Clock(transformers.TrainerCallback):
    """When each step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())


def trainer(work: dict, algorithm: str, folder: str, steps: int) -> transformers.Trainer:
    """The trainer with every prompt in each step and nothing that is not the step."""
    P, n, L, R = (work[k] for k in ("prompts", "samples", "prompt_tokens", "new_tokens"))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, work["model"]["vocab_size"], (P, L), generator=draw).tolist()
    prompts = [" ".join(f"w{i}" for i in row) for row in tokens]
    common = {
        "output_dir": folder, "max_steps": steps, "use_cpu": True, "bf16": False, "fp16": False,
        "gradient_checkpointing": False, "learning_rate": 1e-5, "lr_scheduler_type": "constant",
        "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "max_completion_length": R, "temperature": 1.0, "generation_kwargs": {"min_new_tokens": R},
        "per_device_train_batch_size": P * n // work["pieces"],
        "gradient_accumulation_steps": work["pieces"],
    }  # fmt: skip
    clock = Clock()
    if algorithm == "grpo":
        config = trl.GRPOConfig(num_generations=n, beta=0.0, **common)
        made = trl.GRPOTrainer(
            model=model(work), args=config, processing_class=tokenizer(work), callbacks=[clock],
            reward_funcs=lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids],
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        )  # fmt: skip
    else:
        # It draws one completion per row, so every prompt stands there n times.
        rows = [prompt for prompt in prompts for _ in range(n)]
        config = trl.DistillationConfig(beta=1.0, **common)  # Reverse KL.
        made = trl.DistillationTrainer(
            model=model(work), teacher_model=model(work), args=config,
            processing_class=tokenizer(work), callbacks=[clock],
            train_dataset=datasets.Dataset.from_dict({"prompt": rows}),
        )  # fmt: skip
    made.clock = clock
    return made


def main() -> None:
    """Arguments: work as JSON, grpo or opd, number of steps. Prints JSON."""
    work, algorithm, steps = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(work, algorithm, folder, steps)
        made.train()
    ends = made.clock.ends
    found = {
        "library": f"TRL {trl.__version__}",
        "step_s": [b - a for a, b in itertools.pairwise(ends)],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
