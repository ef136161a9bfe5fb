"""A judge of one pair, for configs that name one."""


def longer(prompt: str, first: str, second: str) -> int:
    """0 where the first completion is at least as long, else 1."""
    return int(len(first) < len(second))
