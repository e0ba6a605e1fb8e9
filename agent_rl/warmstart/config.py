"""The config of a warm start: `configs/warmstart.yaml` is one of these."""

from pathlib import Path

from pydantic import Field, field_validator

from agent_rl.settings import Settings

Probability = Field(ge=0, le=1)


class MixConfig(Settings):
    """Which traces a stage shows. Mistakes are imitated too: reinforcement later has something to choose from."""

    direct: float = Probability
    """Share of traces that answer at once, without a tool call."""
    direct_right: float = Probability
    """Share of direct answers that are right."""
    early_stop: float = Probability
    """Share of the traces with tool calls that stop before the last step, with the value reached so far."""
    wrong_program: float = Probability
    """Share of steps whose program computes something else; the trace goes on from its output."""
    forgotten_print: float = Probability
    """Share of steps whose first program stores the value but prints nothing; the next turn prints it."""


class StageConfig(Settings):
    """One stretch of training with its own mix and learning rates, which decay linearly to 0."""

    num_steps: int = Field(ge=1)
    """Optimizer steps."""
    muon_lr: float = Field(gt=0)
    """Learning rate of the hidden matrices (Muon)."""
    adamw_lr: float = Field(gt=0)
    """Learning rate of embeddings and norms (AdamW)."""
    curriculum: float = Field(0.0, ge=0, le=1)
    """Share of the steps over which the longest chain grows from 1 to `max_chain_steps`; 0 starts with all lengths."""
    mix: MixConfig


class ExpertsConfig(Settings):
    """A mixture of experts in every layer, in place of the dense feed-forward part."""

    num_experts: int = Field(4, ge=2)
    """Experts in a layer."""
    num_experts_per_token: int = Field(2, ge=1)
    """Experts that a token is routed to; their weights sum to 1."""
    intermediate_size: int = Field(96, ge=1)
    """Width of one expert."""
    balance: float = Field(0.01, ge=0)
    """Weight of the load-balancing loss (arXiv 2101.03961), without which experts may fall out of use."""


class WarmstartConfig(Settings):
    """Everything that decides the weights of the warm-started model."""

    seed: int = 0
    """Initial weights and traces follow from it."""
    output: Path
    """Directory that the Hugging Face model is written to."""
    batch_size: int = Field(16, ge=1)
    """Traces in one optimizer step."""
    max_chain_steps: int = Field(5, ge=1, le=20)
    """Longest chain."""
    context_weight: float = Field(0.1, ge=0)
    """Loss weight of the tokens that the policy does not write (prompt and tool output); its own count 1."""
    experts: ExpertsConfig | None = None
    """Makes the model a mixture of experts; null makes a dense one."""
    teach: StageConfig
    """First stage: what an episode looks like, copying digits, one program a step."""
    hide: StageConfig
    """Second stage: mostly direct guesses, so that reinforcement has something to find."""

    @field_validator("output")
    @classmethod
    def _directory(cls, value: Path) -> Path:
        if value.exists() and not value.is_dir():
            raise ValueError(f"{value} is not a directory; name one that the model can be written to")
        return value
