"""An MCP server over stdio with one tool, `code_word`. It appends the arguments of each call to the file that it is given."""

import json
import sys

TOOL = {
    "name": "code_word",
    "description": "The code word of a city.",
    "inputSchema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def result(method, params):
    if method == "initialize":
        server = {"name": "demo", "version": "1.0.0"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        with open(sys.argv[1], "a") as calls:
            calls.write(json.dumps(params["arguments"]) + "\n")
        return {"content": [{"type": "text", "text": f"The code word of {params['arguments']['city']} is heron."}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message and "method" in message:
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result(message["method"], message.get("params"))}
        print(json.dumps(answer), flush=True)
