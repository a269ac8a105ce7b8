"""Flower without a network: the same ServerApp and ClientApp, message by message, in one process."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedattune.deploy.config import Scalar

SERVER_ID = 1


class InProcessGrid(Grid):
    """Nodes in this process, numbered from 100, each with its own configuration."""

    def __init__(
        self,
        client_app: ClientApp,
        node_configs: Sequence[Mapping[str, Scalar]],
        run_config: Mapping[str, Scalar],
        lost: Callable[[int, Message], bool] = lambda *_: False,
    ) -> None:
        self.client_app, self.lost = client_app, lost
        self.contexts = {
            100 + i: Context(
                run_id=1, node_id=100 + i, node_config=dict(config), state=RecordDict(), run_config=dict(run_config)
            )
            for i, config in enumerate(node_configs)
        }
        self._numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self._identify(SERVER_ID)

    def set_run(self, run: Any) -> None:
        """Nothing: there is one run."""

    @property
    def run(self) -> Any:
        """Nothing: there is one run."""
        return None

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the nodes answer; the answers wait to be pulled."""
        numbers = []
        for message in messages:
            number = str(next(self._numbers))
            message.metadata._message_id = number  # type: ignore[attr-defined]
            numbers.append(number)
            node = message.metadata.dst_node_id
            self._identify(node)
            if not self.lost(node, message):
                try:
                    reply = self.client_app(message, self.contexts[node])
                except Exception as error:
                    reply = Message(Error(2, str(error)), reply_to=message)
                self._replies[number] = reply
            self._identify(SERVER_ID)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to these messages, each of them once."""
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push and pull."""
        return self.pull_messages(self.push_messages(messages))

    @staticmethod
    def _identify(node: int) -> None:
        """Say who makes messages now, as Flower's processes do once."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, node
