"""Runs a script whose terminal is its standard input, as a shell's is: when that goes, the kernel sends SIGHUP.

python on_a_terminal.py SCRIPT ARGUMENTS...
"""

import fcntl
import runpy
import sys
import termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
