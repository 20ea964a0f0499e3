"""Changes that schemathesis makes to each request before it is sent: the hooks of test_judge_schemathesis.py.

Bodies that are valid are made answerable: what one field demands of another, or of the model, is beyond what JSON Schema
can say. Bodies that are not valid are sent as they are, but for a bound on the reply.
"""

import schemathesis
from schemathesis import GenerationMode

MODEL = "smollm2"
A_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# The fields for the form of a reply, with values that Baton can enforce.
OUTPUTS = {"json": A_SCHEMA, "regex": "[a-z]", "choice": ["a"], "grammar": 'root ::= "a"', "json_object": True}
FORMS = {"response_format": None, "structured_outputs": None, "guided_json": A_SCHEMA, "guided_regex": "[a-z]",
         "guided_choice": ["a"], "guided_grammar": 'root ::= "a"', "json_schema": A_SCHEMA, "grammar": 'root ::= "a"',
         "regex": "[a-z]", "ebnf": 'root ::= "a"'}
# The fields that bound a reply, by route, each with its smallest number.
LENGTHS = {
    "/v1/chat/completions": (("max_tokens", "max_completion_tokens"), -1),
    "/v1/completions": (("max_tokens",), -1),
    "/completion": (("n_predict",), -1),
    "/v1/responses": (("max_output_tokens",), 1),
    "/v1/messages": (("max_tokens",), 1),
    "/api/chat": (("num_predict",), -(2**31)),
    "/api/generate": (("num_predict",), -(2**31)),
}


@schemathesis.hook
def before_call(ctx, case, kwargs):
    if case.meta.generation.mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
        case.body = answerable(case.body)
        if case.path.startswith("/v1/messages") and case.body["messages"][-1].get("role") == "assistant":
            # Baton does not continue an assistant's message.
            case.body["messages"].append({"role": "user", "content": "Go on."})
    bound(case)
    if isinstance(case.query, dict) and "stream" in case.query:
        # `?stream=1` never ends.
        case.query["stream"] = "0"


def bound(case):
    """Keeps replies short, unless the length is the mistake in the body."""
    if case.path not in LENGTHS or not isinstance(case.body, dict):
        return
    fields, least = LENGTHS[case.path]
    place = case.body
    if "num_predict" in fields:
        if place.get("options") is None:
            place["options"] = {}
        place = place["options"]
        if not isinstance(place, dict):
            return
    # Anthropic requires the field.
    if place.get(fields[0]) is None and case.path != "/v1/messages":
        place[fields[0]] = 2
    for field in fields:
        wanted = place.get(field)
        # 0 means no limit in num_predict and no token in the others.
        if is_whole(wanted) and least <= wanted < 2**32 and wanted not in (1, 2) and (wanted or field == "num_predict"):
            place[field] = 2


def is_whole(value):
    """Returns true for an integer in the sense of JSON Schema: 7162.0 is one, true is not."""
    return not isinstance(value, bool) and (isinstance(value, int) or isinstance(value, float) and value.is_integer())


def answerable(body):
    """Adapts the body to what its fields require of each other and of this model."""
    body = dict(body)
    if "model" in body and body["model"]:
        body["model"] = MODEL
    elif "name" in body:
        body["name"] = MODEL
    body = without_images(body)
    schemas(body)
    tools(body)
    if body.get("top_logprobs"):
        body["logprobs"] = True
    # The model has no infilling, image support, reasoning, or other vector lengths: docs/compatibility.md. The context is
    # not smaller than the model's, and tokens precede a prompt only where it has a place for them.
    for field in ("suffix", "dimensions", "think", "context"):
        body.pop(field, None)
    if isinstance(body.get("options"), dict):
        body["options"].pop("num_ctx", None)
    if body.get("stream") or body.get("suffix"):
        body.pop("prompt_logprobs", None)
    if isinstance(body.get("prompt"), list) and "n" in body:
        body["n"] = 1
    if isinstance(body.get("messages"), list):
        # Few enough for the context.
        body["messages"] = body["messages"][-4:]
    for field in ("prompt", "input", "tokens", "content"):
        if isinstance(body.get(field), list):
            # Up to 2,048 texts would be computed.
            body[field] = known(body[field][:40])
    for place in (body, body.get("options")):
        if isinstance(place, dict) and place.get("logit_bias"):
            place["logit_bias"] = {str(int(token) % 1000): bias for token, bias in place["logit_bias"].items()}
    return body


def without_images(value):
    """Removes images, which the model does not support."""
    if isinstance(value, dict):
        return {key: without_images(inner) for key, inner in value.items() if key != "images"}
    if isinstance(value, list):
        is_image = lambda item: isinstance(item, dict) and item.get("type") in ("image", "image_url", "input_image")
        return [without_images(item) for item in value if not is_image(item)]
    return value


def known(items):
    """Keeps tokens within the vocabulary."""
    if isinstance(items, list):
        return [known(item) for item in items]
    return int(items) % 1000 if isinstance(items, (int, float)) and not isinstance(items, bool) else items


def schemas(body):
    """Removes keywords that Baton cannot enforce from schemas, and leaves one form of the reply."""
    outputs = body.get("structured_outputs")
    if isinstance(outputs, dict):
        first = [field for field in OUTPUTS if outputs.get(field) is not None][:1]
        body["structured_outputs"] = {field: OUTPUTS[field] for field in first}
    # The dialects' own fields for the form of a reply come first.
    own = [(body.get(field) or {}).get("format") for field in ("text", "output_config")]
    has_own = any([*own, body.get("format"), body.get("output_format")])
    forms = [field for field in FORMS if body.get(field) is not None]
    for field in forms if has_own else forms[1:]:
        body.pop(field)
    if not has_own and forms and FORMS[forms[0]] is not None:
        body[forms[0]] = FORMS[forms[0]]
    places = (("response_format",), ("response_format", "json_schema"), ("text", "format"), ("output_config", "format"),
              ("output_format",))
    for path in places:
        place = body
        for name in path:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict) and isinstance(place.get("schema"), dict):
            place["schema"] = A_SCHEMA
    if isinstance(body.get("format"), dict):
        body["format"] = A_SCHEMA
    for tool in [*(body.get("tools") or []), *(body.get("functions") or [])]:
        for place in (tool, tool.get("function")):
            for field in ("parameters", "input_schema"):
                if isinstance(place, dict) and place.get(field):
                    place[field] = A_SCHEMA


def tools(body):
    """Gives tools unique names, few enough for the context, and a choice among them."""
    for field in ("tools", "functions"):
        if isinstance(body.get(field), list):
            body[field] = body[field][:3]
    for n, space in enumerate(body.get("tools") or []):
        if space.get("type") != "namespace":
            custom_format(space)
            continue
        space["tools"] = space["tools"][:2]
        for m, tool in enumerate(space["tools"]):
            tool["name"] = f"g{n}{m}"
            custom_format(tool)
            if tool.get("parameters"):
                tool["parameters"] = A_SCHEMA
    if body.get("tools"):
        body.pop("functions", None)
    for field, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        named = []
        for n, tool in enumerate(body.get(field) or []):
            place = tool.get("function", tool)
            # Other types of tools are removed.
            if place is tool and tool.get("type") == "namespace":
                place["name"] = f"n{n}"
                continue
            if place is tool and tool.get("type") not in (None, "function", "custom"):
                continue
            if isinstance(place, dict) and "name" in place:
                place["name"] = f"f{n}"
                named.append(place["name"])
        wanted = body.get(choice)
        if not named:
            body.pop(choice, None)
        elif isinstance(wanted, dict):
            if wanted.get("type") == "tool":
                wanted["name"] = named[0]
            for place in (wanted, wanted.get("function"), *(wanted.get("tools") or [])):
                if isinstance(place, dict) and "name" in place:
                    place["name"] = named[0]


def custom_format(tool):
    """Gives a custom tool a grammar that is one."""
    if isinstance(tool.get("format"), dict) and tool["format"].get("definition") is not None:
        tool["format"]["definition"] = 'start: "a"' if tool["format"].get("syntax") == "lark" else "a"
