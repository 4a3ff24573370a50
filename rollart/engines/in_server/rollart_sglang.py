"""Starts SGLang's server with the key that the environment holds: SGLang itself takes one on its command line only.

Run by the server's own interpreter, as a file; imports nothing of ours. What processes it starts import this again.
"""

import os
import runpy
import sys

TOKEN_VARIABLE = "ROLLART_SERVER_TOKEN"

if __name__ == "__main__":
    sys.argv = ["sglang.launch_server", *sys.argv[1:], "--api-key", os.environ.pop(TOKEN_VARIABLE)]
    runpy.run_module("sglang.launch_server", run_name="__main__")
