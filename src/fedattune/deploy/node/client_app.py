"""The Flower ClientApp: the node's `NodeRuntime` answers each message."""

from collections.abc import Mapping

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ...core.algorithm import Algorithm
from ...training.backends.message import WorkerMessage
from ..grid import pack_record, unpack_record
from .files import report_error
from .node import NodeRuntime


def make_client_app(custom_algorithms: Mapping[str, Algorithm] | None = None) -> ClientApp:
    """Make a ClientApp, with your own methods by name.

    Assign it to `app` in a module, and name that module under `clientapp` in the app's pyproject.toml.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        asked = None
        try:
            node = NodeRuntime(context.node_config, context.run_config, custom_algorithms)
            try:
                asked = unpack_record(message.content)
                content = pack_record(node.answer(asked))
            except Exception as error:
                content = pack_record(_log_failure(node, error, asked, message.content))
        except Exception as error:  # Flower would send the text of the error to the server
            content = pack_record(WorkerMessage({"kind": "failed", "error": type(error).__name__}))
        return Message(content, reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(answer)
    return app


def _log_failure(
    node: NodeRuntime, error: Exception, asked: WorkerMessage | None, content: RecordDict
) -> WorkerMessage:
    """Log that a message could not be read, or that a reply could not be packed; reply with the kind of the error."""
    unreadable = WorkerMessage({"kind": "unreadable"})
    head = (asked or unreadable).head
    report_error(node.folder, error, head)
    reply = WorkerMessage({"kind": "failed", "error": type(error).__name__})
    try:
        if asked is None:
            n_bytes = sum(record.count_bytes() for record in content.values())
            node.audit.append("in", unreadable, head, n_bytes)
        node.audit.append("out", reply, head)
    except Exception as other:  # a log that was changed, or a full disk
        report_error(node.folder, other, head)
        reply = WorkerMessage({"kind": "failed", "error": type(other).__name__})
    return reply


app = make_client_app()
