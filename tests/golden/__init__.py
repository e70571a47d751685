"""Golden behaviour: what every variant computed when it was recorded, compared after each change.

corpus/         64 conversations as text, with all that variants read (see `preparation.py`)
behaviour/      by variant: loss terms and gradient norms of three steps of each stage, and answers
commands/       by stage structure: what `attune train` logged and validated

Values are compared by position, so names of stages, players, updates and terms are only
for readers and may change. Answers are compared exactly, numbers to a relative tolerance of 1e-4.

To re-record after a change that is meant to alter a computation or the order of random draws:

    python -m tests.golden.record [NAME ...]

A commit that re-records contains nothing else, and its message says why the behaviour changed.
"""
