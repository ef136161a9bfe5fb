"""One file a command of `lit-rl`: what happens around a Trainer's `fit` and `validate`. They know no config format."""
