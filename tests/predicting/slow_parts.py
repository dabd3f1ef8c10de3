"""A job that takes a tenth of a second longer for each part, to be killed on its way.

python -m tests.predicting.slow_parts predict RUN SOURCE OUT
python -m tests.predicting.slow_parts embed SOURCE OUT BACKBONE
"""

import sys
import time

import rfdlc
from rfdlc.predicting import embed as embedding
from rfdlc.predicting import predict as predicting
from rfdlc.predicting.parts import Parts

write = Parts.write


def slowly(self, part, rows, broken):
    write(self, part, rows, broken)
    time.sleep(0.1)


if __name__ == "__main__":
    Parts.write = slowly
    embedding.ROWS, predicting.PART_ROWS = 16, 8
    job, *arguments = sys.argv[1:]
    if job == "predict":
        rfdlc.predict(*arguments)
    else:
        rfdlc.embed(*arguments[:2], backbone=arguments[2], image_size=12, device="cpu")
