"""``python -m decode``: one decode worker."""

import sys

from decode.config import DecodeConfig
from decode.worker import serve
from wire.options import parse

if __name__ == "__main__":
    sys.exit(serve(parse(DecodeConfig, "decode")))
