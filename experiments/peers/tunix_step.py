"""Seconds of Tunix's GRPO step on a given work; run by compare.py. It has no OPD.

In an environment of its own, with Python 3.12: pip install google-tunix.
"""

import itertools
import json
import resource
import sys
import time
from importlib import metadata

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout


class Tokenizer:
    """Token i is the word `wi`; 0 pads, and no token that is drawn ends a text."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def encode(self, text: str, **_) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids, **_) -> str:
        return " ".join(f"w{int(i)}" for i in ids)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return self.vocabulary  # Beyond the last.

    def pad_id(self) -> int:
        return 0


class Clock:
    """A made-up reward that looks at the time: it is asked once per step, after the rollout."""

    __name__ = "clock"

    def __init__(self):
        self.asked = []

    def __call__(self, prompts, completions, **_):
        self.asked.append(time.perf_counter())
        return [float(len(text) % 2) for text in completions]


def main() -> None:
    """Arguments: work as JSON, grpo or opd, number of steps. Prints JSON."""
    work, algorithm, steps = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    clock = Clock()
    if algorithm == "grpo":
        run(work, steps, clock)
    found = {
        "library": f"Tunix {metadata.version('google-tunix')}, jax {jax.__version__}",
        "step_s": [b - a for a, b in itertools.pairwise(clock.asked)],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(found))


def run(work: dict, steps: int, clock: Clock) -> None:
    """GRPO steps with all prompts in each."""
    P, n, L, R = (work[k] for k in ("prompts", "samples", "prompt_tokens", "new_tokens"))
    c = work["model"]
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), automatic, devices=jax.devices()[:1])
    config = llama.ModelConfig(
        num_layers=c["num_layers"], vocab_size=c["vocab_size"], embed_dim=c["embed_dim"],
        hidden_dim=c["mlp_dim"], num_heads=c["num_heads"], head_dim=c["head_dim"],
        num_kv_heads=c["num_kv_heads"], rope_theta=10_000, norm_eps=1e-5,
        weight_tying=c["tie_embeddings"],
    )  # fmt: skip
    with mesh:
        actor = llama.Llama3(config, rngs=nnx.Rngs(0))
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=Tokenizer(c["vocab_size"]),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT), mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-5),
                eval_every_n_steps=10**6,
                max_steps=steps,
                mini_batch_size=P,
                train_micro_batch_size=P // work["pieces"],
                rollout_micro_batch_size=P,
                compute_logps_micro_batch_size=P,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=R, max_prompt_length=L, kv_cache_size=L + R + 1,
                temperature=1.0, top_p=None, top_k=None, eos_tokens=[c["vocab_size"]],
            ),
        ),
    )  # fmt: skip
    learner = grpo_learner.GRPOLearner(
        cluster, grpo_learner.GRPOConfig(num_generations=n, beta=0.0), clock
    )
    tokens = np.random.default_rng(0).integers(1, c["vocab_size"], (P, L))
    prompts = [" ".join(f"w{i}" for i in row) for row in tokens]
    learner.train([{"prompts": np.array(prompts)} for _ in range(steps)])


if __name__ == "__main__":
    main()
