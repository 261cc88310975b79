"""The stages by name. Each is one function, (config, framework, run) -> final metrics, that reads top to bottom."""

from rlhf.stages.ppo import ppo
from rlhf.stages.rm import rm
from rlhf.stages.sft import sft

STAGES = {"sft": sft, "rm": rm, "ppo": ppo}
