"""One final LightningModule a file. What they share, mechanics and no method, is in `on_policy.py` and
`policy_module.py`."""

from lit_rl.algorithms.evaluation import Evaluation as Evaluation
from lit_rl.algorithms.grpo import GRPO as GRPO
from lit_rl.algorithms.optimizers import AdamW as AdamW
from lit_rl.algorithms.ppo import PPO as PPO
from lit_rl.algorithms.reinforce import Reinforce as Reinforce
from lit_rl.algorithms.rloo import RLOO as RLOO
from lit_rl.algorithms.schedules import Constant as Constant
from lit_rl.algorithms.schedules import Cosine as Cosine
from lit_rl.algorithms.schedules import Linear as Linear
