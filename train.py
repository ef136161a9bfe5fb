"""`python train.py [group=choice ...] [key=value ...]`; `python train.py --help` is one page."""

from lit_rl.cli import main

if __name__ == "__main__":
    main()
