"""The methods, one LightningModule each, none derived from another, and the settings that they take."""

from lit_rl.algorithms.bco import BCO as BCO
from lit_rl.algorithms.cpo import CPO as CPO
from lit_rl.algorithms.dpo import DPO as DPO
from lit_rl.algorithms.evaluation.validation import Evaluation as Evaluation
from lit_rl.algorithms.gkd import GKD as GKD
from lit_rl.algorithms.grpo import GRPO as GRPO
from lit_rl.algorithms.kto import KTO as KTO
from lit_rl.algorithms.nash_md import NashMD as NashMD
from lit_rl.algorithms.online_dpo import OnlineDPO as OnlineDPO
from lit_rl.algorithms.optim.optimizers import AdamW as AdamW
from lit_rl.algorithms.optim.schedules import Constant as Constant
from lit_rl.algorithms.optim.schedules import Cosine as Cosine
from lit_rl.algorithms.optim.schedules import Linear as Linear
from lit_rl.algorithms.orpo import ORPO as ORPO
from lit_rl.algorithms.ppo import PPO as PPO
from lit_rl.algorithms.reinforce import Reinforce as Reinforce
from lit_rl.algorithms.reward_modeling import ProcessRewardModeling as ProcessRewardModeling
from lit_rl.algorithms.reward_modeling import RewardModeling as RewardModeling
from lit_rl.algorithms.rloo import RLOO as RLOO
from lit_rl.algorithms.sft import SFT as SFT
from lit_rl.algorithms.tpo import TPO as TPO
from lit_rl.algorithms.xpo import XPO as XPO
