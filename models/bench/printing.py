"""What `ggraph generate` does for whoever reads its text, prompt after prompt in one process.

So the command's loop can be measured without the seconds in which it finds its model: the first
text of such a process is no measure either. A line of JSON asks, [IDS, NEW]; the text is printed as
it comes, greedily and without an end, and then END.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

from ggraph.decode.sampler import SamplerConfig

from ..run.generation import Generation
from ..run.load import Loaded, load

END = b"\xff"  # which is in no text


def answer(m: Loaded) -> None:
    """Print until standard input ends."""
    m.engine.ends = frozenset()
    for line in sys.stdin:
        ids, new = json.loads(line)
        for piece in Generation(m, ids, SamplerConfig(temp=0), new).run(None):
            if piece:
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.buffer.write(END)
        sys.stdout.flush()


if __name__ == "__main__":
    with closing(load(Path(sys.argv[1]), threads=int(sys.argv[2]))) as model:
        answer(model)
