"""The Flower ClientApp: each message is answered by the node's `Host`."""

from collections.abc import Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...core.algorithm import Algorithm
from ...training.backends.message import WorkerMessage
from .grid import pack_record, unpack_record
from .node import NodeRuntime


def make_client_app(own: Mapping[str, Algorithm] | None = None) -> ClientApp:
    """A ClientApp that also knows methods of the user's own, by name.

    A module that assigns it to `app` is named under `clientapp` in the app's pyproject.toml.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        try:
            host = NodeRuntime(context.node_config, context.run_config, own)
            content = pack_record(host.answer(unpack_record(message.content)))
        except Exception as error:  # Flower would send its text to the server
            content = pack_record(WorkerMessage({"kind": "failed", "error": type(error).__name__}))
        return Message(content, reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(answer)
    return app


app = make_client_app()
