"""Number the random streams of a run."""

from enum import IntEnum


class Stream(IntEnum):
    """Random streams drawn from one seed; each has its own number, so that no two see the same draws.

    The seed of a stream is the list of the run's seed (or the split's), the stream, and the round, the client, or both.
    A run with probes also uses PROBE plus the number of the stream that it probes for, and one that augments images
    AUGMENTATION plus that of the stream whose batches they are in.
    """

    COHORT = 1
    TRAINING = 2
    FINE_TUNING = 3
    DROPOUT = 4
    NEWCOMERS = 5
    EVALUATION = 6
    ATTACKERS = 7
    ATTACK = 8
    RECORD_NOISE = 31
    RECORD_BATCHES = 32
    CLIENT_NOISE = 41
    PROBE_SPLIT = 101
    PROBE = 102
    AUGMENTATION = 201
