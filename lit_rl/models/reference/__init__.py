"""What a policy is compared with: fixed, following it, or other weights."""

from lit_rl.models.reference.base import AdapterBase as AdapterBase
from lit_rl.models.reference.base import Auto as Auto
from lit_rl.models.reference.base import Fixed as Fixed
from lit_rl.models.reference.base import FrozenCopy as FrozenCopy
from lit_rl.models.reference.base import Held as Held
from lit_rl.models.reference.base import InitialAdapter as InitialAdapter
from lit_rl.models.reference.base import OnCPU as OnCPU
from lit_rl.models.reference.base import Reference as Reference
from lit_rl.models.reference.base import ReferenceFree as ReferenceFree
from lit_rl.models.reference.base import Scorer as Scorer
from lit_rl.models.reference.moving import BEMA as BEMA
from lit_rl.models.reference.moving import EMA as EMA
from lit_rl.models.reference.moving import Mixing as Mixing
from lit_rl.models.reference.other_model import OtherModel as OtherModel
