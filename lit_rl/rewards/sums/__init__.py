"""Several reward functions as one number: weighted, by recipes, named by path in a config, watched."""
