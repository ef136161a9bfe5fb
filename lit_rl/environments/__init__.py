"""Environments: the other side of a conversation, which answers the policy between its turns."""

from lit_rl.environments.custom import CustomEnvironment
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.from_gymnasium import GymnasiumEnvironment
from lit_rl.environments.function_tools import FunctionTools
from lit_rl.environments.mcp_servers import MCPTools

__all__ = ["CustomEnvironment", "EnvironmentFactory", "FunctionTools", "GymnasiumEnvironment", "MCPTools"]
