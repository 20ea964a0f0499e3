"""What the model of these tests says, played by a scripted upstream.

A turn is chosen by the number of tool results in the conversation, so a repeated request gets the same turn. Requests
without tools, such as those for a title, get a text of their own.
"""

from typing import NamedTuple

MODEL = "scripted"
WITHOUT_TOOLS = "A title"


class Turn(NamedTuple):
    """A text, or calls of tools: pairs of a name and its arguments."""

    text: str = ""
    calls: tuple = ()


def call(name, **arguments):
    """A turn that is one call."""
    return Turn(calls=((name, arguments),))


class Script(NamedTuple):
    """The turns, and the text for requests without tools."""

    turns: list
    without_tools: str = WITHOUT_TOOLS

    def turn(self, body):
        """The turn that answers this body of /v1/chat/completions."""
        if not body.get("tools"):
            return Turn(self.without_tools)
        n_results = sum(message["role"] == "tool" for message in body["messages"])
        return self.turns[min(n_results, len(self.turns) - 1)]
