"""The results of single clients, as a run gives them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClientResult:
    """The result of one client.

    Attributes:
        id: name of the client.
        n_train: its training samples, and `n_test` its test samples.
        received: its test accuracy after the last communication, and `trained` after the local training before it;
            its RMSE if the target is a number.

    """

    id: str
    n_train: int
    n_test: int
    received: float | None
    trained: float | None


@dataclass(frozen=True)
class NewcomerResult:
    """The result of a client that joined after training; RMSE in place of accuracies if the target is a number.

    Attributes:
        id: name of the client.
        n_train: its training samples, and `n_test` its test samples.
        received: test accuracy with the model that the server has for it.
        trained: test accuracy after local rounds of its own from there.
        local: test accuracy after training alone, from the initial model, for as many steps.

    """

    id: str
    n_train: int
    n_test: int
    received: float
    trained: float
    local: float
