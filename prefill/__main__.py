"""``python -m prefill``: one prefill worker."""

import sys

from prefill.config import PrefillConfig
from prefill.worker import serve
from wire.options import parse

if __name__ == "__main__":
    sys.exit(serve(parse(PrefillConfig, "prefill")))
