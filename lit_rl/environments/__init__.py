"""Environments: the other side of a conversation, which answers the policy between its turns."""

from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.gymnasium_environment import GymnasiumEnvironment
from lit_rl.environments.mcp_tools import MCPTools
from lit_rl.environments.user_environments import CustomEnvironment, FunctionTools

__all__ = ["CustomEnvironment", "EnvironmentFactory", "FunctionTools", "GymnasiumEnvironment", "MCPTools"]
