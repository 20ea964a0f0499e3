"""What the model of these tests says, played by a scripted upstream and by a scripted GGUF model.

A turn is chosen by the number of tool results in the conversation, so a repeated request gets the same turn. Requests
without tools, such as those for a title, get a text of their own.
"""

import json
import os
import subprocess
from typing import NamedTuple

MODEL = "scripted"
WITHOUT_TOOLS = "A title"
# Qwen's marks of a call, which make Baton read the hermes format.
CALL, CALL_END = "<tool_call>", "</tool_call>"
# The prompt ends with a control token for each turn.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if tools %}"
    "{{ '<|turn' ~ (messages | selectattr('role', 'equalto', 'tool') | list | length) ~ '|>' }}"
    "{% else %}<|plain|>{% endif %}{# arguments #}"
)


class Turn(NamedTuple):
    """A text, or calls of tools: pairs of a name and its arguments."""

    text: str = ""
    calls: tuple = ()


def call(name, /, **arguments):
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

    def write_model(self, path):
        """Writes a GGUF model that plays the script. SCRIPTED_GGUF names the program that does it."""
        n_results, replies = 0, [("<|plain|>", self.without_tools)]
        for turn in self.turns:
            calls = [
                f"{CALL}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CALL_END}" for name, arguments in turn.calls
            ]
            replies.append((f"<|turn{n_results}|>", turn.text + "\n".join(calls)))
            n_results += len(turn.calls)
        script = {
            "template": TEMPLATE,
            "control": ["<|im_start|>"],
            "user_defined": [CALL, CALL_END],
            "end": "<|im_end|>",
            "context_length": 131072,
            "replies": [{"after": after, "pieces": pieces(reply)} for after, reply in replies],
        }
        source = path.with_suffix(".json")
        source.write_text(json.dumps(script))
        subprocess.run([os.environ["SCRIPTED_GGUF"], source, path], check=True)


def pieces(reply):
    """A reply as tokens: the marks of calls, and pieces of up to 8 characters."""
    found = []
    while reply:
        mark = next((mark for mark in (CALL, CALL_END) if reply.startswith(mark)), None)
        next_mark = min((at for at in (reply.find(CALL, 1), reply.find(CALL_END, 1)) if at > 0), default=len(reply))
        end = len(mark) if mark else min(8, next_mark)
        found.append(reply[:end])
        reply = reply[end:]
    return found
