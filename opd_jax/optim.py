"""The optimizer: AdamW behind a global-norm clip, with a warm-up and a decay."""

import dataclasses

import optax

SCHEDULES = ("constant", "cosine", "linear")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW; moments are fp32 like the parameters they belong to."""

    learning_rate: float = 1e-3
    schedule: str = "constant"  # After the warm-up: "constant", or to `final_fraction` by the end.
    final_fraction: float = 0.1  # Of the learning rate, at the stage's last update.
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # Of all parameters, gains and embedding included.
    clip_norm: float = 1.0  # Of the gradient; 0: never clip.

    def __post_init__(self):
        limits = {
            "schedule": (self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            "learning_rate": (self.learning_rate > 0, "must be positive"),
            "final_fraction": (0 <= self.final_fraction <= 1, "must be in [0, 1]"),
            "warmup_steps": (self.warmup_steps >= 0, "must not be negative (0: no warm-up)"),
            "b1": (0 <= self.b1 < 1, "must be in [0, 1)"),
            "b2": (0 <= self.b2 < 1, "must be in [0, 1)"),
            "eps": (self.eps > 0, "must be positive"),
            "weight_decay": (self.weight_decay >= 0, "must not be negative (0: none)"),
            "clip_norm": (self.clip_norm >= 0, "must not be negative (0: never clip)"),
        }
        for name, (ok, wanted) in limits.items():
            if not ok:
                raise ValueError(f"optimizer.{name}={getattr(self, name)!r}: {wanted}")


def budget(s: OptimizerSettings, steps: int) -> int:
    """The updates that a schedule needs to know of: without a decay none are, and stages of any
    length share one compiled update."""
    return steps if s.schedule != "constant" else 0


def learning_rate(s: OptimizerSettings, steps: int) -> optax.Schedule:
    """Learning rate by update number, counted in optimizer updates, never in micro-batches."""
    body = max(steps - 1 - s.warmup_steps, 1)  # From the first full rate to the last update.
    after = {
        "constant": lambda: optax.constant_schedule(s.learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(s.learning_rate, body, s.final_fraction),
        "linear": lambda: optax.linear_schedule(
            s.learning_rate, s.learning_rate * s.final_fraction, body
        ),
    }[s.schedule]()
    if s.warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(
        s.learning_rate / (s.warmup_steps + 1), s.learning_rate, s.warmup_steps
    )
    return optax.join_schedules([warmup, after], [s.warmup_steps])


def make_optimizer(s: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """The optimizer of a stage with a budget of `steps` updates."""
    clip = optax.clip_by_global_norm(s.clip_norm) if s.clip_norm else optax.identity()
    adam = optax.adamw(
        learning_rate(s, steps), b1=s.b1, b2=s.b2, eps=s.eps, weight_decay=s.weight_decay
    )
    return optax.chain(clip, adam)
