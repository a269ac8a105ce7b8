"""The Flower ClientApp: the node's `NodeRuntime` answers each message."""

from collections.abc import Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...core.algorithm import Algorithm
from ...training.backends.message import WorkerMessage
from .grid import pack_record, unpack_record
from .node import NodeRuntime


def make_client_app(custom_algorithms: Mapping[str, Algorithm] | None = None) -> ClientApp:
    """Make a ClientApp, with your own methods by name.

    Assign it to `app` in a module, and name that module under `clientapp` in the app's pyproject.toml.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        try:
            asked = unpack_record(message.content)
            version = int(str(message.content["head"]["version"]))  # the server reads what it writes
            node = NodeRuntime(context.node_config, context.run_config, custom_algorithms)
            content = pack_record(node.answer(asked), version)
        except Exception as error:  # Flower would send the text of the error to the server
            content = pack_record(WorkerMessage({"kind": "failed", "error": type(error).__name__}))
        return Message(content, reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(answer)
    return app


app = make_client_app()
