"""How a policy is measured: validation by generating or by loss, win rates, statistics."""
